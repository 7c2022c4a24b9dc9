"""`initialize` and `feedline train` under a real Slurm of two nodes, node1 and node2, on this machine."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "cluster"
SBATCH = ["sbatch", "--wait", "--nodes=2", "--output=/dev/null"]


@pytest.fixture(autouse=True, scope="module")
def _slurm():
    configuration = os.environ.get("SLURM_CONF", "/run/feedline-cluster/slurm.conf")
    command = ["sinfo", "--noheader", "--Node", "--responding", "--format=%N"]
    try:
        nodes = programs.run(
            command,
            env={**os.environ, "SLURM_CONF": configuration},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        ).stdout.split()
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        pytest.fail(f"These tests need a running Slurm, but sinfo fails ({error}); run .ci/cluster-up")
    if sorted(nodes) != ["node1", "node2"]:
        pytest.fail(f"These tests need node1 and node2, but Slurm has {nodes}; run .ci/cluster-up")


def batch(launcher, tmp_path, script, *options):
    """Runs a batch script to its end, and returns its output."""
    (tmp_path / "script").write_text(f"#!/bin/sh\n{script}\n")
    files = {"stdout": tmp_path / "out", "stderr": tmp_path / "err"}
    launcher.run(
        *SBATCH, *options, f"--output={files['stdout']}", f"--error={files['stderr']}", tmp_path / "script"
    )
    return subprocess.CompletedProcess(script, 0, **{name: path.read_text() for name, path in files.items()})


def words(command):
    return " ".join(command)


@pytest.mark.parametrize("processes", [2, 4])
def test_the_tasks_of_srun_compute_together(launcher, joined_members, processes):
    done = launcher.run("srun", "-N2", f"--ntasks-per-node={processes // 2}", *launcher.member)
    assert launcher.members(done) == joined_members(processes)
    for process, line in enumerate(launcher.told(done)):
        device = "all local devices" if processes == 2 else f"local device {process % 2}"
        assert re.fullmatch(
            rf"feedline: process {process} of {processes}, found Slurm \(SLURM_PROCID={process}\), "
            rf"coordinator node1:\d+, {device}",
            line,
        )


def test_a_single_task_does_not_join(launcher, joined_members):
    done = launcher.run("srun", "-n1", *launcher.member)
    assert launcher.members(done) == joined_members(1)
    assert launcher.told(done) == ["feedline: process 0 of 1, because no launcher started other processes"]


def test_a_program_in_a_shell_of_salloc_does_not_join(launcher, joined_members):
    done = launcher.run("salloc", "-N2", "-n2", *launcher.member)
    assert launcher.members(done) == joined_members(1)
    assert re.search(r"Slurm job \d+ has 2 tasks, but srun did not start this one", done.stderr)
    # With LaunchParameters=use_interactive_step, salloc starts its shell as a step, like this srun.
    done = launcher.run("salloc", "-N2", "-n2", "srun", "--interactive", *launcher.member)
    assert launcher.members(done) == joined_members(1)


def test_a_batch_script_does_not_join_but_its_srun_does(launcher, joined_members, tmp_path):
    member = words(launcher.member)
    done = batch(launcher, tmp_path, f"{member}; srun {member}", "--ntasks=2")
    assert sorted(launcher.printed(done), key=lambda seen: (seen["processes"], seen["process"])) == [
        *joined_members(1),
        *joined_members(2),
    ]


def test_two_concurrent_steps_of_a_job_do_not_join_each_other(launcher, joined_members, tmp_path):
    step = f"srun --overlap {words(launcher.member)} &"
    done = batch(launcher, tmp_path, f"{step}\n{step}\nwait", "--ntasks=2")
    assert launcher.members(done) == sorted(2 * joined_members(2), key=lambda seen: seen["process"])


def test_a_job_submitted_from_within_a_step_does_not_join_it(launcher, joined_members, tmp_path):
    out = tmp_path / "out"
    inner = f"sbatch --wait --nodes=1 --ntasks=1 --output={out} --wrap='{words(launcher.member)}'"
    launcher.run("srun", "-N2", "-n2", "sh", "-c", f'[ "$SLURM_PROCID" = 1 ] || {inner}')
    done = subprocess.CompletedProcess(inner, 0, out.read_text())
    assert launcher.members(done) == joined_members(1)


@pytest.mark.parametrize(
    ("mpirun", "found"), [("mpirun --allow-run-as-root", "Open MPI"), ("mpiexec.mpich", "MPICH")]
)
def test_mpirun_within_a_slurm_job(launcher, joined_members, tmp_path, mpirun, found):
    """mpirun starts its daemons with srun, so its processes see srun's variables too."""
    mpirun = f"{mpirun} -n 2 {words(launcher.member)}"
    done = batch(launcher, tmp_path, mpirun, "--ntasks=2", "--ntasks-per-node=1")
    assert launcher.members(done) == joined_members(2)
    assert f"found {found} (" in done.stderr


def test_training(launcher):
    done = launcher.run("srun", "-N2", "-n2", *launcher.train)
    (result,) = launcher.printed(done)
    assert (result["processes"], result["devices"]) == (2, 4)
    assert isinstance(result["final_loss"], float)


def test_scancel_saves_the_same_step_on_both_nodes(launcher, tmp_path):
    log, folder = tmp_path / "log", tmp_path / "runs"
    with launcher.endless(
        "srun", "-N2", "-n2", "--job-name=to-cancel", *launcher.small, log=log, folder=folder
    ) as step:
        launcher.run("scancel", "--name=to-cancel")
        step.wait(60)
    (step,) = launcher.saved(folder)
    assert f"feedline: terminated after step {step:,}, which is saved" in log.read_text()
    assert log.read_text().count("Exited with exit code 143") == 2


def test_the_sbatch_script_saves_before_the_time_limit_and_resumes_when_requeued(launcher, tmp_path):
    """Slurm's shortest limit is a minute; the signal of `--signal` comes when less than 50 s are left."""
    log, folder = tmp_path / "log", tmp_path / "runs"
    script = (EXAMPLES / "dgx.sbatch").read_text().replace("#SBATCH --gpus-per-node=8\n", "")
    (tmp_path / "dgx.sbatch").write_text(script)
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={log}", "--parsable"]
    feedline = str(Path(sys.executable).with_name("feedline"))
    endless = ["--batch-size", "64", "--layers", "1", "--width", "16", "--steps", "1000000000"]
    done = launcher.run(
        *("sbatch", "--time=1", "--signal=TERM@20", *options, tmp_path / "dgx.sbatch", *endless),
        FEEDLINE=feedline,
        CHECKPOINTS=str(folder),
    )
    job = done.stdout.strip()
    try:
        found = launcher.await_line(log, r"terminated after step ([\d,]+), which is saved")
        launcher.await_line(log, "task [01]: Exited with exit code 143")
        step = int(found[1].replace(",", ""))
        assert step in launcher.saved(folder)
        requeued(launcher, job)
        launcher.await_line(log, f"step {step:,} is saved, training goes on from there")
    finally:
        launcher.run("scancel", job)


def requeued(launcher, job):
    """Slurm delays a requeued job for two minutes. This releases the job after 10 s, and again until it runs.

    At once would be too early: if the old batch script ends after the new one began, Slurm takes both for ended.
    """
    began = time.monotonic()
    released = began + 10
    again = {"JobState=RUNNING", "Restarts=1"}
    while not again <= set(told := launcher.run("scontrol", "show", "job", job).stdout.split()):
        now = time.monotonic()
        assert now < began + 240, " ".join([*told, launcher.run("sinfo", "--Node", "--long").stdout])
        if "Reason=BeginTime" in told and now >= released:
            released = now + 10
            launcher.run(
                "sh", "-c", f"scontrol update JobId={job} StartTime=now || true"
            )  # it may just have started
        time.sleep(0.5)
