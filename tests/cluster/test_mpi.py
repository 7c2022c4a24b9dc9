"""`initialize` and `feedline train` under a real Open MPI, of version 4 and 5, and MPICH."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

# Debian's: an activated environment may hide it in PATH. The options allow root, and any number of cores.
MPIRUN = ["/usr/bin/mpirun", "--allow-run-as-root", "--oversubscribe"]
MPIRUN_5 = [str(Path(sys.executable).with_name("mpirun")), *MPIRUN[1:]]  # A package of the extra `test`.
MPICH = "mpiexec.mpich"


@pytest.fixture(autouse=True)
def _mpi():
    for command in (MPIRUN[0], MPIRUN_5[0], MPICH):
        if shutil.which(command) is None:
            pytest.fail(f"These tests need {command}, which is not there; run .ci/cluster-up")


@pytest.mark.parametrize(
    ("mpirun", "found"),
    [
        (MPIRUN, "Open MPI (OMPI_COMM_WORLD_RANK=%d)"),
        (MPIRUN_5, "Open MPI (OMPI_COMM_WORLD_RANK=%d)"),
        ([MPICH], "MPICH (PMI_RANK=%d)"),
    ],
    ids=["Open MPI 4", "Open MPI 5", "MPICH"],
)
def test_the_processes_of_mpirun_compute_together(launcher, joined_members, mpirun, found):
    done = launcher.run(*mpirun, "-n", 2, *launcher.member)
    assert launcher.members(done) == joined_members(2)
    for process, line in enumerate(launcher.told(done)):
        assert re.fullmatch(
            rf"feedline: process {process} of 2, found {re.escape(found % process)}, "
            rf"coordinator 127.0.0.1:\d+, local device {process}",
            line,
        )


def test_a_single_process_does_not_join(launcher, joined_members):
    done = launcher.run(*MPIRUN, "-n", 1, *launcher.member)
    assert launcher.members(done) == joined_members(1)
    assert launcher.told(done) == ["feedline: process 0 of 1, because no launcher started other processes"]


@pytest.mark.parametrize("mpirun", [MPIRUN, [MPICH]], ids=["Open MPI", "MPICH"])
def test_two_concurrent_runs_do_not_join_each_other(launcher, joined_members, mpirun):
    def script(tag):
        return f"{' '.join(map(str, [*mpirun, '-n', 2, *launcher.member]))} >{tag} & "

    done = launcher.run("sh", "-c", "set -e; cd $(mktemp -d); " + script("a") + script("b") + "wait; cat a b")
    assert launcher.members(done) == sorted(2 * joined_members(2), key=lambda seen: seen["process"])


def test_training(launcher):
    done = launcher.run(*MPIRUN, "-n", 2, *launcher.train)
    (result,) = launcher.printed(done)
    assert (result["processes"], result["devices"]) == (2, 4)
    assert isinstance(result["final_loss"], float)


def test_sigterm_to_one_process_saves_the_same_step_on_all(launcher, tmp_path):
    log, folder = tmp_path / "log", tmp_path / "runs"
    tell = ["sh", "-c", 'echo "pid of $OMPI_COMM_WORLD_RANK: $$"; exec "$@"', "-"]
    with launcher.endless(*MPIRUN, "-n", 2, *tell, *launcher.small, log=log, folder=folder) as mpirun:
        os.kill(int(launcher.await_line(log, r"pid of 1: (\d+)")[1]), signal.SIGTERM)
        assert mpirun.wait(60) == 143
    (step,) = launcher.saved(folder)
    assert f"feedline: terminated after step {step:,}, which is saved" in log.read_text()


def test_sigterm_to_mpirun_saves_if_mpirun_waits_long_enough(launcher, tmp_path):
    """mpirun sends SIGTERM after some seconds, and SIGKILL after as many more; the default is one second."""
    log, folder = tmp_path / "log", tmp_path / "runs"
    patience = ["--mca", "odls_base_sigkill_timeout", 15]
    with launcher.endless(*MPIRUN, *patience, "-n", 2, *launcher.small, log=log, folder=folder) as mpirun:
        mpirun.terminate()
        mpirun.wait(60)
    (step,) = launcher.saved(folder)
    assert f"feedline: terminated after step {step:,}, which is saved" in log.read_text()
