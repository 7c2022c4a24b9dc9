"""The scripts and the manifest of examples/cluster: they are run where that is possible, otherwise parsed."""

import subprocess
import sys
from pathlib import Path

import programs
import pytest
import yaml

from feedline._src.cluster.detect import find

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "cluster"
FEEDLINE = str(Path(sys.executable).with_name("feedline"))
FEW = ["--steps", "5", "--batch-size", "64", "--json"]  # of an option that is given twice, the last counts


@pytest.mark.parametrize("name", ["dgx.sbatch", "mpirun.sh"])
def test_bash_parses_the_script(name):
    programs.run(["bash", "-n", EXAMPLES / name], check=True)


@pytest.fixture
def batch(tmp_path):
    """Runs dgx.sbatch with stubs of Slurm's commands. Returns its exit code, their calls, and its messages."""
    commands = tmp_path / "bin"
    commands.mkdir()
    saves = '[ -z "$STEP" ] || mkdir -p $CHECKPOINTS/$STEP $JAX_COMPILATION_CACHE_DIR'
    trains = f'case "$*" in *rm\\ -rf*) exit $CLEANING;; esac\n{saves}\nexit $CODE'
    for name, what in {"srun": trains, "scontrol": "exit $REQUEUING"}.items():
        (commands / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/did\n{what}\n')
        (commands / name).chmod(0o755)

    def run(code, restarts=0, step="", cleaning=0, requeuing=0):
        (tmp_path / "did").write_text("")
        slurm = {"SUBMIT_DIR": tmp_path, "JOB_ID": 7, "NNODES": 2, "NTASKS_PER_NODE": 8, "CPUS_ON_NODE": 112}
        given = {"CODE": code, "STEP": step, "CLEANING": cleaning, "REQUEUING": requeuing, "TMPDIR": tmp_path}
        environ = {f"SLURM_{name}": value for name, value in slurm.items()} | given
        if restarts:
            environ["SLURM_RESTART_COUNT"] = restarts
        done = programs.run(
            ["bash", EXAMPLES / "dgx.sbatch", "--steps", "5"],
            env={
                "PATH": f"{commands}:/usr/bin:/bin",
                "CHECKPOINTS": str(tmp_path / "runs"),
                **{name: str(value) for name, value in environ.items()},
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, (tmp_path / "did").read_text(), done.stderr

    return run


@pytest.mark.parametrize("cleaning", [0, 1])
@pytest.mark.parametrize("code", [0, 1, 137])
def test_the_sbatch_script_ends_with_the_code_of_training(batch, code, cleaning):
    ended, did, told = batch(code, cleaning=cleaning)
    assert ended == code
    train, clean = did.splitlines()
    assert "--cpus-per-task=14 " in train  # 112 processors without hyperthreads, for eight processes
    assert train.endswith(" --steps 5")
    assert "--ntasks=2 rm -rf " in clean
    assert ("stays on a node" in told) == bool(cleaning)


def test_the_sbatch_script_requeues_what_was_stopped_and_keeps_its_caches(batch, tmp_path):
    ended, did, _ = batch(143, step=3)
    assert ended == 143
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".compiled", ".starts", "3"]
    assert did.splitlines()[1:] == ["scontrol requeue 7"]
    ended, _, told = batch(143, requeuing=1)
    assert ended == 143
    assert "was not requeued" in told


def test_the_sbatch_script_ends_when_three_runs_saved_no_step(batch):
    """A run is counted when it starts, so also a run that Slurm itself requeued."""
    steps = [10, "", "", 20, "", "", ""]
    for restarts, step in enumerate(steps):
        ended, did, _ = batch(143, restarts, step)
        assert (ended, did.splitlines()[-1]) == (143, "scontrol requeue 7")
    ended, did, told = batch(143, len(steps))
    assert ended == 1
    assert "3 runs of this job saved no step after step 20" in told
    (clean,) = did.splitlines()  # neither trained nor requeued
    assert "rm -rf" in clean
    assert batch(0)[0] == 0  # submitted again
    assert batch(0, restarts=1)[0] == 0


def test_the_jobset_starts_processes_that_find_each_other():
    (jobset,) = yaml.safe_load_all((EXAMPLES / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert job["replicas"] == 1
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    (container,) = spec["template"]["spec"]["containers"]
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    found = [find({**environ, "JOB_COMPLETION_INDEX": str(i)}) for i in range(spec["completions"])]
    assert [one.process for one in found] == list(range(spec["completions"]))
    assert {one.processes for one in found} == {spec["completions"]}
    name = jobset["metadata"]["name"]
    assert {one.host for one in found} == {f"{name}-{job['name']}-0-0.{name}"}
    assert {one.port for one in found} == {port["containerPort"] for port in container["ports"]}


def lost(written, read, path=""):
    """The paths of written values that were not read back unchanged. What was not written may have a default."""
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from lost(value, read.get(name), f"{path}.{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, (value, found) in enumerate(zip(written, read, strict=True)):
            yield from lost(value, found, f"{path}[{index}]")
    elif written != read:
        yield path


def unknown_fields(manifest):
    """The fields of a manifest that the schema of a JobSet does not have. `ValueError`: a value has a wrong type.

    The models are generated from the published schema of Kubernetes and JobSet.
    """
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    return list(lost(manifest, JobsetV1alpha2JobSet.from_dict(manifest).to_dict()))


@pytest.mark.slow
def test_each_field_of_the_jobset_is_one_of_the_published_schema():
    (jobset,) = yaml.safe_load_all((EXAMPLES / "jobset.yaml").read_text())
    assert unknown_fields(jobset) == []


@pytest.mark.cluster
def test_the_sbatch_script_trains(launcher, tmp_path):
    """On two nodes without GPUs: the script loses its line that asks for GPUs, and options override others."""
    script = (EXAMPLES / "dgx.sbatch").read_text().replace("#SBATCH --gpus-per-node=8\n", "")
    (tmp_path / "dgx.sbatch").write_text(script)
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/log"]
    (tmp_path / "wrapper").write_text(f'#!/bin/sh\nmkdir -p "$FEEDLINE_CACHE"; exec {FEEDLINE} "$@"\n')
    (tmp_path / "wrapper").chmod(0o755)
    launcher.run(
        "sbatch",
        "--wait",
        *options,
        tmp_path / "dgx.sbatch",
        *FEW,
        FEEDLINE=str(tmp_path / "wrapper"),
        CHECKPOINTS=str(tmp_path / "runs"),
        TMPDIR=str(tmp_path),
    )
    lines = (tmp_path / "log").read_text().splitlines()
    log = "\n".join(line.partition(": ")[2] for line in lines)  # without the process number that srun adds
    (result,) = launcher.printed(subprocess.CompletedProcess("", 0, log))
    assert (result["processes"], result["devices"]) == (2, 4)
    assert not [*tmp_path.glob("feedline-*"), *Path("/raid").glob("feedline-*")]  # the job's cache is gone


@pytest.mark.cluster
def test_the_mpirun_script_trains(launcher):
    options = "--allow-run-as-root --oversubscribe"
    done = launcher.run(EXAMPLES / "mpirun.sh", *FEW, FEEDLINE=FEEDLINE, PROCESSES="2", MPIRUN_OPTIONS=options)
    (result,) = launcher.printed(done)
    assert (result["processes"], result["devices"]) == (2, 4)
