"""The launcher of a process is found by the variables that real launchers set. Some may be missing.

The dictionaries were taken from Slurm 22.05, Open MPI 4.1.4 and 5.0.11, MPICH 4.0.2 and torchrun of torch 2.13,
and shortened to what concerns processes. Those of PBS and TORQUE follow their manuals.
"""

from pathlib import Path

import pytest

from feedline._src.cluster.cores import own_processes, share_of
from feedline._src.cluster.detect import LAUNCHERS, describe_single_process, find
from feedline._src.cluster.launchers import mpich
from feedline._src.cluster.launchers.slurm import first_host, tasks_on

BY_HAND = {"FEEDLINE_COORDINATOR": "node1:1234", "FEEDLINE_PROCESSES": "4", "FEEDLINE_PROCESS": "1"}
BY_HAND_FOR_JAX = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}
BATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
TASK = BATCH | {
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
LONE_TASK = TASK | {
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
}
MPI_4 = MPI | {
    "OMPI_MCA_orte_hnp_uri": "2074279936.0;tcp://10.0.0.1,10.1.0.1:36691;tcp6://[fd00::2]:36813",
    "PMIX_NAMESPACE": "2074279937",
    "PMIX_RANK": "3",
}
MPI_5 = MPI | {"PMIX_NAMESPACE": "prterun-dgx-01-6053@1", "PMIX_RANK": "3", "PRTE_LAUNCHED": "1"}
MPICH = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}
SCRIPT_FOR_TORCH = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4"}
TORCHRUN = SCRIPT_FOR_TORCH | {
    "GROUP_RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "ce79b6b7-3240-4a28-88c9-9a8a63c91397",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
POD = {
    "FEEDLINE_COORDINATOR": "train-workers-0-0.train:55527",
    "FEEDLINE_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}
PBS = {
    "FEEDLINE_COORDINATOR": "node1:61500",
    "FEEDLINE_PROCESSES": "4",
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "12.server",
    "PBS_NODENUM": "3",
    "PBS_TASKNUM": "4",
}
TORQUE = PBS | {"PBS_NODENUM": "1", "PBS_NUM_PPN": "2", "PBS_VNODENUM": "3"}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.fixture(autouse=True)
def _mpiexec(monkeypatch):
    """No variable says where mpiexec of MPICH listens; here it is this address."""
    monkeypatch.setattr(mpich, "control_address", lambda: ("node1", "41219"))


@pytest.mark.parametrize(
    ("environ", "launcher", "expected"),
    [
        (BY_HAND, "environment variables", (1, 4, "node1", 0, 1)),
        (BY_HAND_FOR_JAX, "environment variables", (1, 4, "node1", 0, 1)),
        (BY_HAND | {"FEEDLINE_LOCAL_PROCESSES": "4"}, "environment variables", (1, 4, "node1", 1, 4)),
        (BY_HAND | {"FEEDLINE_COORDINATOR": "[fd00::2]:1234"}, "environment variables", (1, 4, "fd00::2", 0, 1)),
        (TASK, "Slurm", (3, 4, "node1", 1, 2)),
        (TASK | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, "Slurm", (3, 4, "127.0.0.1", 1, 4)),
        (TASK | {"SLURM_STEP_TASKS_PER_NODE": "1,3"}, "Slurm", (3, 4, "node1", 1, 3)),
        (MPI_4, "Open MPI", (3, 4, "10.0.0.1", 1, 2)),
        (MPI_4 | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd00::2]:36"}, "Open MPI", (3, 4, "fd00::2", 1, 2)),
        (MPI_5, "Open MPI", (3, 4, "dgx-01", 1, 2)),
        (MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "Open MPI", (3, 4, "127.0.0.1", 1, 4)),
        (MPICH, "MPICH", (3, 4, "node1", 1, 2)),
        (MPICH | {"MPI_LOCALNRANKS": "4"}, "MPICH", (3, 4, "127.0.0.1", 1, 4)),
        (POD, "Kubernetes", (2, 4, "train-workers-0-0.train", 0, 1)),
        (PBS, "PBS", (3, 4, "node1", 0, 1)),
        (TORQUE, "PBS", (3, 4, "node1", 1, 2)),
        (TORCHRUN, "torchrun", (3, 4, "node1", 1, 2)),
        (SCRIPT_FOR_TORCH, "torchrun's variables", (3, 4, "node1", 0, 1)),
        (SCRIPT_FOR_TORCH | {"MASTER_ADDR": "fd00::2"}, "torchrun's variables", (3, 4, "fd00::2", 0, 1)),
        # of nested launchers, the inner one counts: srun or mpirun may start a torchrun on each host; under Slurm,
        # mpirun and mpiexec start their daemons by srun. Variables that are set by hand come first
        (TORCHRUN | MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"} | TASK, "torchrun", (3, 4, "node1", 1, 2)),
        (MPI_4 | TASK | {"SLURM_STEP_NUM_TASKS": "2"}, "Open MPI", (3, 4, "10.0.0.1", 1, 2)),
        (MPICH | TASK | {"SLURM_STEP_NUM_TASKS": "2"}, "MPICH", (3, 4, "node1", 1, 2)),
        (BY_HAND | TORCHRUN | MPI_4 | TASK | POD | PBS, "environment variables", (1, 4, "node1", 0, 1)),
        # srun --mpi=pmi2 and --mpi=pmix also set PMI's variables; scripts also set torch's, alike for all tasks
        (TASK | {"SLURM_NTASKS": ""}, "Slurm", (3, 4, "node1", 1, 2)),
        (TASK | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMIX_RANK": "3"}, "Slurm", (3, 4, "node1", 1, 2)),
        (TASK | SCRIPT_FOR_TORCH | {"RANK": "0"}, "Slurm", (3, 4, "node1", 1, 2)),
        (POD | SCRIPT_FOR_TORCH, "Kubernetes", (2, 4, "train-workers-0-0.train", 0, 1)),
    ],
)
def test_each_launcher_gives_a_process_its_place(environ, launcher, expected, monkeypatch):
    found = find(environ | {"HOME": "/root"})
    assert found.launcher == launcher
    place = found.local_process, found.local_processes
    assert (found.process, found.processes, found.host, *place) == expected
    monkeypatch.setattr("os.environ", environ)
    assert own_processes() == expected[-1]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"FEEDLINE_PROCESSES": "1"},
        {"FEEDLINE_PROCESSES": "1", "JOB_COMPLETION_INDEX": "7"},
        {"FEEDLINE_PROCESSES": "1", "PBS_NODENUM": "0"},
        {"FEEDLINE_COORDINATOR": "", "FEEDLINE_PROCESSES": "", "FEEDLINE_PROCESS": ""},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},
        BATCH,
        without(BATCH, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),  # a shell under salloc
        LONE_TASK,
        LONE_TASK | {"SLURM_STEP_ID": "4294967290"},  # a shell under salloc that is a step
        LONE_TASK | {"FEEDLINE_COORDINATOR": "node1:1234"},
        TASK | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # a job submitted from within a step
        BATCH | {"PMIX_RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "4"},  # such a job, from within srun --mpi=pmi2
        without(PBS, "FEEDLINE_PROCESSES", "FEEDLINE_COORDINATOR"),  # a job script, or pbsdsh without a count
        MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        MPICH | {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"SLURM_PROCID": ""},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
    ],
)
def test_a_single_process_is_detected(environ, monkeypatch):
    assert find(environ) is None
    monkeypatch.setattr("os.environ", environ)
    assert own_processes() == 1


def test_a_job_of_several_tasks_without_srun_gets_a_hint():
    assert describe_single_process(BATCH) == (
        "process 0 of 1, Slurm job 2 has 4 tasks, but srun did not start this one: put srun before python"
    )
    for environ in (LONE_TASK, BATCH | {"SLURM_NTASKS": ""}, BATCH | {"SLURM_JOB_ID": ""}):
        assert describe_single_process(environ) == "process 0 of 1, because no launcher started other processes"


@pytest.mark.parametrize(
    ("environ", "changed"),
    [
        (TASK, "SLURM_JOB_ID"),
        (TASK, "SLURM_STEP_ID"),
        (MPI_4, "PMIX_NAMESPACE"),
        (TORCHRUN, "TORCHELASTIC_RUN_ID"),
        (TORCHRUN, "MASTER_PORT"),  # --standalone has no run id of its own
    ],
)
def test_a_job_has_one_port_and_another_job_another(environ, changed, monkeypatch):
    port = find(environ).port
    assert 61440 <= port < 65536
    others = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "RANK": "0",
    }
    assert find({name: others.get(name, value) for name, value in environ.items()}).port == port
    assert find(environ | {changed: "77"}).port != port
    assert find(environ | {"JAX_COORDINATOR_PORT": "4321"}).port == 4321
    assert find(SCRIPT_FOR_TORCH).port == 29500  # process 0 itself listens there
    of_mpich = find(MPICH).port
    monkeypatch.setattr(mpich, "control_address", lambda: ("node1", "41220"))
    assert find(MPICH).port != of_mpich


@pytest.mark.parametrize("environ", [TASK, MPI_4, without(MPI_5, "PMIX_NAMESPACE"), MPICH, TORCHRUN])
def test_a_coordinator_set_by_hand_replaces_that_of_the_launcher(environ, monkeypatch):
    monkeypatch.setattr(mpich, "control_address", lambda: None)
    for name in ("FEEDLINE_COORDINATOR", "JAX_COORDINATOR_ADDRESS"):
        assert find(environ | {name: "head:1234"}).coordinator == "head:1234"


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (TASK, "STEP_NUM_TASKS PROCID JOB_ID STEP_ID STEP_NODELIST LOCALID NODEID STEP_TASKS_PER_NODE"),
        (MPI_4, "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPI_5, "PMIX_NAMESPACE"),
        (MPICH, "PMI_SIZE PMI_RANK MPI_LOCALRANKID MPI_LOCALNRANKS"),
        (TORCHRUN, "LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR"),
        (POD, "FEEDLINE_COORDINATOR"),
        (PBS, "FEEDLINE_COORDINATOR"),
        (BY_HAND, "FEEDLINE_COORDINATOR FEEDLINE_PROCESSES FEEDLINE_PROCESS"),
        (BY_HAND_FOR_JAX, "JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID"),
    ],
)
def test_a_variable_that_is_missing_is_named(environ, names):
    for name in names.split():
        missing = f"SLURM_{name}" if environ is TASK else name
        with pytest.raises(ValueError, match=missing):
            find(without(environ, missing))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"FEEDLINE_COORDINATOR": "a:1"},
            "found FEEDLINE_COORDINATOR=a:1 without FEEDLINE_PROCESSES and FEEDLINE_P",
        ),
        (BY_HAND | {"FEEDLINE_PROCESS": "4"}, "numbered from 0 to their count less one, found process 4 of 4"),
        (BY_HAND | {"FEEDLINE_PROCESS": "-1"}, "FEEDLINE_PROCESS must be an integer of at least 0, found '-1'"),
        (BY_HAND | {"FEEDLINE_PROCESSES": "0"}, "FEEDLINE_PROCESSES must be an integer of at least 1, found '0'"),
        (BY_HAND | {"FEEDLINE_COORDINATOR": "node1"}, "host:port, with a port below 65536, found 'node1'"),
        (BY_HAND | {"FEEDLINE_COORDINATOR": ":1234"}, "found ':1234'"),
        (BY_HAND | {"FEEDLINE_COORDINATOR": "node1:65536"}, "found 'node1:65536'"),
        (TASK | {"SLURM_PROCID": "9" * 5000}, "SLURM_PROCID must be an integer of at least 0, found '999"),
        (TASK | {"SLURM_STEP_TASKS_PER_NODE": "2"}, r"an entry for each node, .* found '2' on node 1"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, r"found process 2 of 2 on its host \(RANK=3\)"),
        (MPICH | {"MPI_LOCALRANKID": "2"}, "found process 2 of 2 on its host"),
        (SCRIPT_FOR_TORCH | {"RANK": "4"}, "found process 4 of 4"),
        ({"WORLD_SIZE": "4"}, "found WORLD_SIZE=4 without MASTER_ADDR and MASTER_PORT and RANK; set"),
        ({"RANK": "0", "FEEDLINE_COORDINATOR": "a:1"}, "found RANK=0 without WORLD_SIZE; set"),
        ({"PMIX_RANK": "0"}, r"\(PMIX_RANK=0\), but does not say where .*set FEEDLINE_PROCESSES to 1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, r"\(PMI_RANK=1\)"),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_RANK=1"),
        ({"JOB_COMPLETION_INDEX": "2"}, "the manifest sets FEEDLINE_COORDINATOR and FEEDLINE_PROCESSES"),
    ],
)
def test_what_contradicts_itself_or_does_not_tell_enough(environ, message):
    with pytest.raises(ValueError, match=message):
        find(environ)


def test_mpich_in_a_container_needs_a_coordinator(monkeypatch):
    monkeypatch.setattr(mpich, "control_address", lambda: None)
    with pytest.raises(ValueError, match=r"mpiexec -genv FEEDLINE_COORDINATOR node1:61500"):
        find(MPICH)


@pytest.mark.parametrize(
    ("gpus", "own", "told"),
    [
        ({}, (1,), "local device 1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (1,), "local device 1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (4, 5, 6, 7), "local devices 4, 5, 6, 7"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None, "all local devices"),  # divided by the launcher
        ({"CUDA_VISIBLE_DEVICES": ""}, None, "all local devices"),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3), "local devices 2, 3"),
        ({"JAX_LOCAL_DEVICE_IDS": "5"}, None, "all local devices"),  # jax reads it
    ],
)
def test_the_second_of_two_processes_on_a_host_gets_its_own_gpus(gpus, own, told):
    for environ in (TASK, MPI_4, MPICH, TORCHRUN, TORQUE):
        found = find(environ | gpus)
        assert found.local_devices == own
        assert str(found).endswith(f"coordinator {found.coordinator}, {told}")


def test_gpus_that_are_divided_or_have_one_process_are_not_divided():
    bound = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_PER_TASK": "4"}
    assert find(TASK | bound).local_devices is None
    assert find(MPI_4 | TASK | bound).local_devices == (2, 3)  # srun started only mpirun's daemons
    assert find(TASK | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "3,1"}).local_devices is None


@pytest.mark.parametrize(
    ("processes", "usable", "present", "quota", "share"),
    [
        (8, 128, 128, None, 16),
        (8, 12, 128, None, 12),  # bound by the launcher
        (8, 4, 4, None, 1),
        (2, 64, 64, 3.5, 2),
        (2, 64, 64, 0.5, 1),
        (2, 6, 64, 4.0, 2),
    ],
)
def test_cores_and_quotas_are_divided_unless_the_process_is_bound(processes, usable, present, quota, share):
    assert share_of(processes, usable, present, quota) == share


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("node[7],host2", "node7"),
        ("dgx-a[1-2]-ib", "dgx-a1-ib"),
        ("rack[2,4-5]-node[007-015],login", "rack2-node007"),
    ],
)
def test_the_first_host_of_a_node_list(node_list, host):
    assert first_host(node_list) == host


def test_the_tasks_of_each_node():
    assert [tasks_on("2(x3),1,4(x2)", node) for node in range(6)] == [2, 2, 2, 1, 4, 4]
    assert tasks_on("1(x900000000),3(x900000000)", 1_000_000_000) == 3
    for wrong in ("2(x0)", "0", "9999999999999(x99999999)", "2(x1", "x", "", "-1", "2(x0),0"):
        with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE must have an entry for each node, such"):
            tasks_on(wrong, 0)


def test_the_documented_table_is_that_of_the_launchers():
    text = (Path(__file__).parents[2] / "docs" / "processes.md").read_text()
    lines = [line for launcher in LAUNCHERS for line in launcher.DOCS.splitlines()]
    assert all(f"\n{line}\n" in text for line in lines)
    rows = [line for line in text.splitlines() if line in lines]
    assert rows == lines
