"""How a process ends: a feed that nobody closed, reads that never return, workers that die or have no guard."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

BEFORE = """
import os, signal, sys, threading, time
import jax, numpy as np
import feedline
from jax.sharding import Mesh, NamedSharding, PartitionSpec
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
"""


def run(tmp_path, body, *, timeout_s=60):
    """Run a script; its result, and how long it took from its last line to the end of the process."""
    script = tmp_path / "script.py"
    script.write_text(f"{BEFORE}{body}")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=timeout_s, cwd=tmp_path
    )
    ended = time.time()
    ends = [line for line in done.stdout.splitlines() if line.startswith("end ")]
    return done, ended - float(ends[-1].split()[1]) if ends else None


READS = {
    "idle": "lambda i: {'x': np.float32(i)}",
    "slow": "lambda i: time.sleep(0.3) or {'x': np.float32(i)}",
    "never returns": "lambda i: threading.Event().wait() if 20 < i < 48 else {'x': np.float32(i)}",
}


@pytest.mark.parametrize("read", READS)
def test_a_feed_that_nobody_closed_does_not_hold_up_the_exit(tmp_path, read):
    done, delay_s = run(
        tmp_path,
        f"""
import grain
rows = grain.MapDataset.range(100).map({READS[read]})
feed = feedline.Feed(rows, 8, sharding)
next(feed), next(feed)
print("end", time.time(), flush=True)
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert delay_s < 2


def test_nor_does_a_stream_whose_read_never_returns(tmp_path):
    done, delay_s = run(
        tmp_path,
        f"""
import grain
rows = grain.MapDataset.range(100).map({READS["never returns"]}).to_iter_dataset(grain.ReadOptions(2, 4))
feed = feedline.Feed(rows, 8, sharding)
next(feed)
print("end", time.time(), flush=True)
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert delay_s < 2


def test_a_read_that_a_closed_feed_left_behind_ends_before_the_interpreter_does(tmp_path):
    done, _ = run(
        tmp_path,
        """
import atexit, grain
atexit.register(lambda: print("left", [t.name for t in threading.enumerate() if t.name.startswith("grain")]))
rows = grain.MapDataset.range(100).map(lambda i: time.sleep(0.02) or {"x": np.float32(i)})
with feedline.Feed(rows, 8, sharding) as feed:
    next(feed)
assert any(t.name.startswith("grain") for t in threading.enumerate())  # busy with a batch that nobody takes
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left []\n", "")


def test_an_exception_in_the_main_thread_is_all_that_is_shown(tmp_path):
    done, _ = run(
        tmp_path,
        """
feed = feedline.Feed(np.zeros((800, 2)), 8, sharding)
next(feed)
raise SystemError("mine")
""",
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "SystemError: mine"
    assert done.stderr.count("Traceback") == 1


WORKERS = """
import multiprocessing
np.save("x.npy", np.arange(6400, dtype=np.float32).reshape(1600, 4))
def main():
    feed = feedline.Feed({"x": "x.npy"}, 8, sharding, reading=feedline.Reading(workers=2))
    next(feed)
    workers = [child.pid for child in multiprocessing.active_children() if "grain" in child.name]
    print("workers", *workers, flush=True)
    return feed, workers
"""


def test_workers_of_a_feed_that_nobody_closed_end_and_leave_no_shared_memory(tmp_path):
    body = """
if __name__ == "__main__":
    feed = main()
    with open("/proc/self/maps") as file:
        maps = file.read().split()
    print("shared", *{word.split("/")[-1] for word in maps if word.startswith("/dev/shm/psm")}, flush=True)
"""
    done, _ = run(tmp_path, WORKERS + body)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(_said(done, "workers")) == 2
    assert not any(Path("/proc", pid).exists() for pid in _said(done, "workers"))
    assert _said(done, "shared")  # a batch did come through shared memory
    assert not any(Path("/dev/shm", name).exists() for name in _said(done, "shared"))


def _said(done, word):
    line = next(line for line in done.stdout.splitlines() if line.startswith(f"{word} "))
    return line.split()[1:]


def test_a_killed_worker_ends_the_feed_with_an_error_within_seconds(tmp_path):
    done, _ = run(
        tmp_path,
        f"""{WORKERS}
if __name__ == "__main__":
    feed, workers = main()
    os.kill(workers[0], signal.SIGKILL)
    began = time.monotonic()
    try:
        for batch in feed:
            pass
    except feedline.WorkerError as error:
        print(f"{{type(error).__name__}} {{error}}")
    assert time.monotonic() - began < 20
    step = feed.get_state()["step"]
    next(feed)  # new workers, and exactly the next batch
    print("went on", feed.get_state()["step"] - step)
    feed.close()
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "WorkerError a worker process must live as long as its feed" in done.stdout
    assert "exit code -9" in done.stdout
    assert done.stdout.splitlines()[-1] == "went on 1"


def test_a_script_without_a_guard_is_told_so(tmp_path):
    done, _ = run(tmp_path, f"{WORKERS}\nmain()\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("feedline.errors.WorkerError: a worker process must live")
    assert 'must build and run its feed under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert "was built while a worker process imports your script" in done.stderr
