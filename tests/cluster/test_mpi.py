"""`initialize` and `feedline train` under a real Open MPI."""

import re
import shutil

import pytest

pytestmark = pytest.mark.cluster

# As root and on any number of cores, as in a container of a CI.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]


@pytest.fixture(autouse=True)
def _open_mpi():
    if shutil.which("mpirun") is None:
        pytest.fail("These tests need mpirun, which is not there; run .ci/cluster-up")


def test_the_processes_of_mpirun_compute_together(launcher, together):
    done = launcher.run(*MPIRUN, "-n", 2, *launcher.member)
    assert launcher.members(done) == together(2)
    for process, line in enumerate(launcher.told(done)):
        assert re.fullmatch(
            rf"feedline: process {process} of 2, found Open MPI \(OMPI_COMM_WORLD_RANK={process}\), "
            rf"coordinator 127.0.0.1:\d+, local device {process}",
            line,
        )


def test_a_single_process_is_on_its_own(launcher, together):
    done = launcher.run(*MPIRUN, "-n", 1, *launcher.member)
    assert launcher.members(done) == together(1)
    assert launcher.told(done) == ["feedline: process 0 of 1, found no other"]


def test_two_runs_at_once_do_not_meet(launcher, together):
    def script(tag):
        return f"{' '.join(map(str, [*MPIRUN, '-n', 2, *launcher.member]))} >{tag} & "

    done = launcher.run("sh", "-c", "set -e; cd $(mktemp -d); " + script("a") + script("b") + "wait; cat a b")
    assert launcher.members(done) == sorted(2 * together(2), key=lambda seen: seen["process"])


def test_training(launcher):
    done = launcher.run(*MPIRUN, "-n", 2, *launcher.train)
    (result,) = launcher.printed(done)
    assert (result["processes"], result["devices"]) == (2, 4)
    assert isinstance(result["final_loss"], float)
