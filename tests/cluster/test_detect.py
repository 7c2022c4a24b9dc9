"""`detect.find` on the variables that real launchers set, whole and in part.

The dictionaries were taken from Slurm 22.05, Open MPI 4.1.4 and 5.0.11, MPICH 4.0.2 and torchrun of torch 2.13,
and shortened to what concerns processes.
"""

import doctest
import importlib
import pkgutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import feedline._src.cluster
import feedline._src.tools.launch
from feedline._src.cluster.cores import processes_on_host
from feedline._src.cluster.detect import describe_single_process, find
from feedline._src.cluster.launchers.mpich import find_mpich
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


def place(environ):
    found = find(environ)
    return found.process, found.processes, found.coordinator.rpartition(":")[0]


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "launcher", "expected"),
    [
        (BY_HAND, "environment variables", (1, 4, "node1")),
        (BY_HAND_FOR_JAX, "environment variables", (1, 4, "node1")),
        (TASK, "Slurm", (3, 4, "node1")),
        (TASK | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, "Slurm", (3, 4, "127.0.0.1")),
        (MPI_4, "Open MPI", (3, 4, "10.0.0.1")),
        (MPI_5, "Open MPI", (3, 4, "dgx-01")),
        (POD, "Kubernetes", (2, 4, "train-workers-0-0.train")),
        (TORCHRUN, "torchrun", (3, 4, "node1")),
        (SCRIPT_FOR_TORCH, "torchrun's variables", (3, 4, "node1")),
    ],
)
def test_each_launcher_is_found(environ, launcher, expected):
    assert find(environ | {"HOME": "/root"}).launcher == launcher
    assert place(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"FEEDLINE_PROCESSES": "1"},
        {"FEEDLINE_PROCESSES": "1", "JOB_COMPLETION_INDEX": "7"},
        {"FEEDLINE_COORDINATOR": "", "FEEDLINE_PROCESSES": "", "FEEDLINE_PROCESS": ""},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},
        BATCH,
        without(BATCH, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),  # A shell under salloc.
        LONE_TASK,
        LONE_TASK | {"SLURM_STEP_ID": "4294967290"},  # A shell under salloc that is a step.
        LONE_TASK | {"FEEDLINE_COORDINATOR": "node1:1234"},
        TASK | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # A job submitted from within a step.
        MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        MPICH | {"PMI_SIZE": "1", "PMI_RANK": "0"},
        without(MPICH, *MPICH) | {"PMI_SIZE": "1", "PMI_RANK": "0"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
        BATCH | {"PMIX_RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "4"},  # A job submitted within srun --mpi=pmi2.
    ],
)
def test_a_single_process_is_detected(environ):
    assert find(environ) is None


def test_a_job_of_several_tasks_without_srun_gets_a_hint():
    assert describe_single_process(BATCH) == (
        "process 0 of 1, Slurm job 2 has 4 tasks, but srun did not start this one: put srun before python"
    )
    assert describe_single_process(LONE_TASK) == "process 0 of 1, found no other"


def test_variables_set_by_hand_take_precedence_over_mpirun_and_mpirun_over_srun():
    assert find(BY_HAND | BY_HAND_FOR_JAX | MPI_4 | TASK | POD).evidence == "FEEDLINE_PROCESS=1"
    assert find(BY_HAND_FOR_JAX | MPI_4 | TASK).evidence == "JAX_PROCESS_ID=1"
    # Under Slurm mpirun starts one daemon a node by srun: its step's tasks are not ours.
    assert find(MPI_4 | TASK | {"SLURM_STEP_NUM_TASKS": "2"}).evidence == "OMPI_COMM_WORLD_RANK=3"


def test_the_inner_of_two_launchers_takes_precedence():
    # srun or mpirun starts one torchrun a host.
    assert find(TORCHRUN | MPI_4 | TASK).launcher == "torchrun"
    assert processes_on_host(TORCHRUN | MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}) == 2
    assert find(TORCHRUN | BY_HAND).evidence == "FEEDLINE_PROCESS=1"
    # Under Slurm, mpiexec of MPICH starts its proxies by srun.
    with pytest.raises(ValueError, match="MPICH"):
        find(MPICH | TASK | {"SLURM_STEP_NUM_TASKS": "2"})
    # srun --mpi=pmi2 and --mpi=pmix set these too.
    assert find(TASK | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMIX_RANK": "3"}).launcher == "Slurm"


def test_variables_of_torch_that_a_script_sets_for_all_tasks_of_srun_do_not_count():
    alike = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}
    assert find(TASK | alike) == find(TASK)
    assert find(TASK | SCRIPT_FOR_TORCH | {"RANK": "0"}) == find(TASK)
    assert find(POD | SCRIPT_FOR_TORCH).evidence == "JOB_COMPLETION_INDEX=2"  # FEEDLINE_PROCESSES is set by hand.


def test_process_0_listens_on_MASTER_PORT_unless_torchrun_does():
    assert find(SCRIPT_FOR_TORCH).coordinator == "node1:29500"
    assert find(SCRIPT_FOR_TORCH | {"MASTER_ADDR": "fd00::2"}).coordinator == "[fd00::2]:29500"
    port = find(TORCHRUN).port
    assert port >= 61440
    assert find(TORCHRUN | {"RANK": "0"}).port == port
    assert find(TORCHRUN | {"TORCHELASTIC_RUN_ID": "other"}).port != port
    assert find(TORCHRUN | {"MASTER_PORT": "29501"}).port != port  # --standalone has no run id of its own


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"LOCAL_RANK": "2"}, "found LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | {"RANK": "4"}, "found process 4 of 4"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE is an integer of at least 1, found 'four'"),
        (
            TORCHRUN | {"MASTER_PORT": "99999"} | {"TORCHELASTIC_RUN_ID": ""},
            "port below 65536, found 'node1:99999'",
        ),
        (MPICH | {"MPI_LOCALRANKID": "2"}, "found MPI_LOCALRANKID=2 and MPI_LOCALNRANKS=2"),
        (
            MPI_4 | {"OMPI_COMM_WORLD_LOCAL_RANK": "5"},
            "found OMPI_COMM_WORLD_LOCAL_RANK=5 and OMPI_COMM_WORLD_LOCAL_SI",
        ),
        ({"WORLD_SIZE": "4"}, "found WORLD_SIZE=4 without MASTER_ADDR and MASTER_PORT and RANK; set"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "without MASTER_ADDR and MASTER_PORT; set"),
        ({"RANK": "0", "FEEDLINE_COORDINATOR": "a:1"}, "found RANK=0 without WORLD_SIZE; set"),
        ({"PMIX_RANK": "0"}, r"\(PMIX_RANK=0\), and does not say where .*set FEEDLINE_PROCESSES to 1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, r"\(PMI_RANK=1\)"),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_RANK=1"),
    ],
)
def test_contradictions_and_launchers_that_do_not_tell_enough(environ, message):
    with pytest.raises(ValueError, match=message):
        find(environ)


def test_mpich_meets_at_the_host_of_mpiexec_on_a_port_of_this_run():
    def place(environ, control=("node1", "41219")):
        found = find_mpich(environ, lambda: control)
        return found.process, found.processes, found.host, found.port, found.local_devices

    port = place(MPICH)[3]
    assert place(MPICH) == (3, 4, "node1", port, (1,))
    assert place(MPICH | {"PMI_RANK": "0"})[3] == port
    assert place(MPICH, ("node1", "41220"))[3] != port
    assert place(MPICH | {"MPI_LOCALNRANKS": "4"})[2] == "127.0.0.1"
    assert find_mpich(MPICH | {"FEEDLINE_COORDINATOR": "node7:1234"}, lambda: None).coordinator == "node7:1234"
    with pytest.raises(ValueError, match=r"mpiexec -genv FEEDLINE_COORDINATOR node1:61500"):
        place(MPICH, None)


@pytest.mark.parametrize("name", ["FEEDLINE_COORDINATOR", "JAX_COORDINATOR_ADDRESS"])
@pytest.mark.parametrize("environ", [TASK, MPI_4, MPI_5, without(MPI_5, "PMIX_NAMESPACE"), MPICH, TORCHRUN])
def test_a_coordinator_set_by_hand_replaces_the_launchers(environ, name):
    assert find(environ | {name: "head:1234"}).coordinator == "head:1234"


@pytest.mark.parametrize("family", [BY_HAND, BY_HAND_FOR_JAX])
@pytest.mark.parametrize("kept", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}])
def test_incomplete_variables_name_the_missing_ones(family, kept):
    names = list(family)
    environ = {names[i]: family[names[i]] for i in kept}
    with pytest.raises(ValueError, match="go together") as error:
        find(environ)
    wanted = " and ".join(names[i] for i in range(3) if i not in kept)
    assert f"set {wanted} too, or unset all of them" in str(error.value)
    assert all(f"{name}={value}" in str(error.value) for name, value in environ.items())


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (TASK, "SLURM_STEP_NUM_TASKS"),
        (TASK, "SLURM_PROCID"),
        (TASK, "SLURM_JOB_ID"),
        (TASK, "SLURM_STEP_ID"),
        (TASK, "SLURM_STEP_NODELIST"),
        (TASK, "SLURM_LOCALID"),
        (TASK, "SLURM_NODEID"),
        (TASK, "SLURM_STEP_TASKS_PER_NODE"),
        (MPI_4, "OMPI_COMM_WORLD_SIZE"),
        (MPI_4, "OMPI_COMM_WORLD_RANK"),
        (MPI_4, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPI_5, "PMIX_NAMESPACE"),
        (MPICH, "PMI_SIZE"),
        (MPICH, "PMI_RANK"),
        (MPICH, "MPI_LOCALRANKID"),
        (MPICH, "MPI_LOCALNRANKS"),
        (TORCHRUN, "LOCAL_RANK"),
        (TORCHRUN, "LOCAL_WORLD_SIZE"),
        (POD, "FEEDLINE_COORDINATOR"),
    ],
)
def test_incomplete_variables_of_a_launcher_name_the_missing_one(environ, name):
    with pytest.raises(ValueError, match=name) as error:
        find(without(environ, name))
    assert "FEEDLINE_COORDINATOR" in str(error.value)


def test_a_job_index_alone_is_an_error_that_explains_the_manifest():
    with pytest.raises(ValueError, match=r"manifest must set FEEDLINE_COORDINATOR .* and FEEDLINE_PROCESSES"):
        find({"JOB_COMPLETION_INDEX": "2"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"FEEDLINE_PROCESS": "4"}, "numbered from 0 to their count less one, found process 4 of 4"),
        ({"FEEDLINE_PROCESS": "-1"}, "FEEDLINE_PROCESS is an integer of at least 0, found '-1'"),
        ({"FEEDLINE_PROCESS": "one"}, "FEEDLINE_PROCESS is an integer of at least 0, found 'one'"),
        ({"FEEDLINE_PROCESSES": "0"}, "FEEDLINE_PROCESSES is an integer of at least 1, found '0'"),
        ({"FEEDLINE_COORDINATOR": "node1"}, "host:port, with a port below 65536, found 'node1'"),
        ({"FEEDLINE_COORDINATOR": ":1234"}, "found ':1234'"),
        ({"FEEDLINE_COORDINATOR": "node1:65536"}, "found 'node1:65536'"),
        ({"FEEDLINE_COORDINATOR": "node1:"}, "found 'node1:'"),
    ],
)
def test_wrong_values(wrong, message):
    with pytest.raises(ValueError, match=message):
        find(BY_HAND | wrong)


def test_an_ipv6_coordinator():
    found = find(BY_HAND | {"FEEDLINE_COORDINATOR": "[fd00::2]:1234"})
    assert (found.host, found.port) == ("fd00::2", 1234)
    only_ipv6 = MPI_4 | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd00::2,fd00::3]:36813"}
    assert find(only_ipv6).host == "fd00::2"


@pytest.mark.parametrize("environ", [MPI_4, MPI_5])
def test_processes_on_one_host_meet_on_its_loopback(environ):
    assert find(environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "changed"), [(TASK, "SLURM_JOB_ID"), (TASK, "SLURM_STEP_ID"), (MPI_4, "PMIX_NAMESPACE")]
)
def test_all_processes_of_a_job_use_one_port_and_another_job_another_port(environ, changed):
    port = find(environ).port
    assert 61440 <= port < 65536
    others = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "OMPI_COMM_WORLD_RANK": "0"}
    assert find({name: others.get(name, value) for name, value in environ.items()}).port == port
    assert find(environ | {changed: "77"}).port != port
    assert find(environ | {"JAX_COORDINATOR_PORT": "4321"}).port == 4321


@pytest.mark.parametrize("environ", [TASK, MPI_4, TORCHRUN])
@pytest.mark.parametrize(
    ("gpus", "own"),
    [
        ({}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (4, 5, 6, 7)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5ebe,GPU-a01c"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None),  # Bound by the launcher.
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
        ({"JAX_LOCAL_DEVICE_IDS": "5"}, None),  # jax reads it.
    ],
)
def test_the_second_of_two_processes_on_a_host_gets_its_own_gpus(environ, gpus, own):
    assert find(environ | gpus).local_devices == own


def test_gpus_that_srun_has_bound_to_a_task_are_not_divided_again():
    bound = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_PER_TASK": "4"}
    assert find(TASK | bound).local_devices is None
    # srun started only mpirun's daemons: the processes of one share what it sees.
    assert find(MPI_4 | TASK | bound).local_devices == (2, 3)


@pytest.mark.parametrize("gpus", [{}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}])
def test_the_only_process_on_a_host_gets_all_gpus(gpus):
    task = TASK | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "3,1"}
    assert find(task | gpus).local_devices is None


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "local device 1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "local devices 2, 3"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "all local devices"),
    ],
)
def test_the_line_that_initialize_prints(gpus, told):
    found = find(TASK | gpus)
    assert str(found) == f"process 3 of 4, found Slurm (SLURM_PROCID=3), coordinator {found.coordinator}, {told}"


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
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
    with pytest.raises(ValueError, match=r"an entry for each node, .* found '2\(x3\)' on node 3"):
        tasks_on("2(x3)", 3)


@pytest.mark.parametrize(
    "tasks", ["2(x0)", "0", "0(x2)", "9999999999999(x99999999)", "2(x1", "x", "", "-1", "2(x0),0"]
)
def test_an_invalid_list_of_tasks_is_an_error(tasks):
    with pytest.raises(
        ValueError, match=r"SLURM_STEP_TASKS_PER_NODE has an entry for each node, such as 2\(x3\),1"
    ):
        tasks_on(tasks, 0)


def test_a_long_list_of_tasks_is_parsed_quickly():
    assert tasks_on("1(x900000000),3(x900000000)", 1_000_000_000) == 3


def test_an_index_of_thousands_of_digits_names_its_variable():
    with pytest.raises(ValueError, match="SLURM_PROCID is an integer of at least 0, found '999"):
        find(TASK | {"SLURM_PROCID": "9" * 5000})


NAMES = sorted({*TASK, *MPI, *MPICH, *TORCHRUN, *BY_HAND, *BY_HAND_FOR_JAX,
                "JOB_COMPLETION_INDEX", "SLURM_GPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "JAX_COORDINATOR_PORT",
                "FEEDLINE_LOCAL_PROCESSES", "OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"})  # fmt: skip
VALUES = st.one_of(
    st.integers(-1, 4).map(str),
    st.from_regex(r"[0-9]{1,20}(\(x[0-9]{1,20}\))?(,[0-9](\(x[0-9]\))?)?", fullmatch=True),
    st.sampled_from(["", "9" * 5000, "²", "٣", "a:1", "a:٣", "node[1-2]", "[", "[::1]:5", "prterun-a-1@1", "0,1"]),
    st.text(max_size=8),
)


@pytest.mark.slow
@settings(max_examples=500, deadline=30_000)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=len(NAMES)))
def test_any_values_of_the_variables_are_detected_or_a_value_error(environ):
    for asked in (find, processes_on_host):
        try:
            asked(environ)
        except ValueError as error:
            assert any(name in str(error) for name in (*NAMES, "coordinator"))  # noqa: PT017


MODULES = [
    module.name
    for package in (feedline._src.cluster, feedline._src.tools.launch)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0
