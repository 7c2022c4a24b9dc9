"""Conversions in other processes, of this machine and of Ray, and one that is killed."""

import contextlib
import fcntl
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import counted
import programs
import pytest
from counted import files_of
from rows_read import read_rows

import feedline
from feedline._src.tools.processes import map_in_processes

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "convert_on_ray.py"
PATIENCE_S = 300


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)])
def test_killed_and_run_again(number, code, tmp_path, monkeypatch):
    """The signal comes while a worker writes the third file. The next run gives the files of an unharmed run."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("reached")
    reached = os.open("reached", os.O_RDONLY | os.O_NONBLOCK)
    lock = os.open("go_on", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-m", "feedline", "convert", "counted:waiting", "out", "--rows-per-shard", "100"]
    with programs.started(
        [*command, "--workers", "1"],
        env=programs.importing(REACHED="reached", GO_ON="go_on"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        ended = os.pidfd_open(run.pid)
        assert reached in select.select([reached, ended], [], [], PATIENCE_S)[0]
        run.send_signal(number)
        assert run.wait(PATIENCE_S) == code
        _, err = run.communicate(timeout=PATIENCE_S)  # returns when all processes have ended, also the worker
    for descriptor in (lock, reached, ended):  # not sooner, or the worker could finish the file
        os.close(descriptor)
    told = "feedline: terminated; finished files are in out.partial; run the same command to continue\n"
    if number != signal.SIGKILL:  # after SIGKILL, only multiprocessing's resource tracker writes
        assert err.decode() == told
    kept = {path: path.stat().st_ino for path in Path("out.partial").glob("rows-*")}
    assert [path.name[:10] for path in sorted(kept)] == ["rows-00000", "rows-00001"]
    feedline.convert(counted.waiting(), "out", rows_per_shard=100)
    assert {path: Path("out", path.name).stat().st_ino for path in kept} == kept
    feedline.convert(counted.waiting(), "at_once", rows_per_shard=100)
    assert files_of("out") == files_of("at_once")


def test_a_process_that_ends_and_a_function_that_fails():
    assert sorted(map_in_processes(abs, [-1, 2, -3], workers=2)) == [1, 2, 3]
    with pytest.raises(TypeError, match="bad operand type"):
        list(map_in_processes(abs, ["x"], workers=1))
    with pytest.raises(feedline.WorkerError, match="was killed, crashed, or did not start: the host may be"):
        list(map_in_processes(functools.partial(os._exit), [3], workers=1))
    with pytest.raises(TypeError, match="this source cannot be pickled"):
        list(map_in_processes(lambda item: item, [1], workers=1))


def test_ray_writes_the_same_files(tmp_path):
    """Runs the example with a real Ray on this machine."""
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:  # Ray's sockets need a short path
        environment = {**os.environ, "RAY_TMPDIR": temporary, "HOME": temporary}
        done = programs.run(
            [sys.executable, EXAMPLE, tmp_path],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "1000 rows in 4 files, those of one machine: True"
        for process in processes_with(f"RAY_TMPDIR={temporary}"):
            ended, _, _ = select.select([process], [], [], PATIENCE_S)
            os.close(process)
            assert ended
    found = feedline.open_source(f"{tmp_path}/by_ray/*.npy")
    assert read_rows(found)["label"].tolist() == list(range(1000))


def processes_with(variable):
    """A pidfd of each process with this environment variable. It is readable once the process has ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(os.pidfd_open(int(path.parent.name)))
    return found
