"""How worker processes end: with their feed or their program, too early, and in a script without a main guard."""

import re
import signal
import time
from pathlib import Path

import pytest
from script_runs import run

pytestmark = pytest.mark.slow


WORKERS = """
import multiprocessing
def main():
    np.save("x.npy", np.arange(6400, dtype=np.float32).reshape(1600, 4))  # here: workers import the script, too
    feed = feedline.Feed({"x": "x.npy"}, 8, sharding, reading=feedline.Reading(workers=2))
    next(feed)
    workers = [child.pid for child in multiprocessing.active_children() if "feedline-worker" in child.name]
    print("workers", *workers, flush=True)
    return feed, workers
"""


@pytest.mark.parametrize("end", ["", "feed.close()", "feed.close(); del batch"])
def test_workers_leave_no_process_and_no_named_memory(tmp_path, end):
    body = f"""
if __name__ == "__main__":
    feed, workers = main()
    batch = next(feed)
    print("memory", open("/proc/self/maps").read().count("memfd:feedline-batch"))
    {end}
    print("named", *[name for name in os.listdir("/dev/shm") if "feedline" in name])
"""
    done, _ = run(tmp_path, WORKERS + body, flags=())
    assert (done.returncode, done.stderr) == (0, "")  # the resource tracker warns of no leak
    assert len(_said(done, "workers")) == 2
    assert not any(Path("/proc", pid).exists() for pid in _said(done, "workers"))
    assert int(_said(done, "memory")[0]) > 0
    assert _said(done, "named") == []


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os._exit(7)", 7),
    ],
)
def test_workers_end_with_a_trainer_that_is_killed(tmp_path, how, code, measured):
    body = f"""
if __name__ == "__main__":
    feed, workers = main()
    print("end", time.time(), flush=True)
    {how}
"""
    done, delay_s = run(tmp_path, WORKERS + body, flags=())
    assert done.returncode == code
    assert delay_s < 30  # and nobody holds standard output or standard error any more
    deadline = time.monotonic() + 30
    while any(_runs(pid) for pid in _said(done, "workers")):  # a process closes its files shortly before its end
        assert time.monotonic() < deadline
        time.sleep(0.01)
    measured("the training process is killed, gets SIGTERM or calls `os._exit`", delay_s)


def _runs(pid):
    """Whether a process has not ended. A zombie, "Z", has ended, but its parent has not waited for it."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def _said(done, word):
    line = next(line for line in done.stdout.splitlines() if line.split()[0] == word)
    return line.split()[1:]


ENDS = {
    "is killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "exit code -9: the kernel sends signal 9 .* when memory runs",
    ),
    "has a bus error": (
        "os.kill(os.getpid(), signal.SIGBUS)",
        "exit code -7: .* a mapped file has no data any more",
    ),
    "exits with 0": ("os._exit(0)", r"exit code 0: .* look for sys\.exit, os\._exit"),
    "is told to exit with 0": ("sys.exit(0)", r"exit code 0: its own code ended it; look for"),
    "exits with 3": ("os._exit(3)", r"exit code 3: .* look for sys\.exit, .*; and look at what it printed"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_worker_that_ends_early_is_an_error_within_seconds(tmp_path, how):
    ends, message = ENDS[how]
    workers = 2 if how == "is killed" else 1  # a second worker lives on, or there is none
    done, _ = run(
        tmp_path,
        f"""
if __name__ == "__main__":
    np.save("x.npy", np.arange(1600, dtype=np.float32))
def leave(batch, rows):
    if 800 in rows.index and len(rows.index) > 1 and not os.path.exists("left"):
        open("left", "w").close()
        {ends}
    return batch
if __name__ == "__main__":
    feed = feedline.Feed(
        {{"x": "x.npy"}}, 8, sharding, order=feedline.Order(shuffle=False), transform=leave, epochs=1,
        reading=feedline.Reading(workers={workers}),
    )
    began = time.monotonic()
    seen = []
    try:
        for batch in feed:
            seen += np.asarray(batch["x"]).tolist()
            began = time.monotonic()
    except feedline.WorkerError as error:
        print(f"{{type(error).__name__}} {{error}}")
    assert time.monotonic() - began < 20
    seen += np.concatenate([np.asarray(batch["x"]) for batch in feed]).tolist()  # from new workers
    assert seen == list(range(1600))
    feed.close()
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert re.match(f"WorkerError a worker process must live as long as its feed, .* ended with {message}", line)
    assert "__main__" not in line  # no advice to add a guard: workers delivered batches


def test_a_script_without_a_main_guard_gets_an_error(tmp_path):
    done, _ = run(tmp_path, f"{WORKERS}\nmain()\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("feedline.WorkerError: a worker process must live")
    assert 'must build and run its feed under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_ctrl_c_that_the_program_catches_does_not_end_its_workers(tmp_path, prefetch):
    """A terminal sends Ctrl-C to all processes of the program."""
    done, _ = run(
        tmp_path,
        f"""
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.save("x.npy", np.arange(800))
    order = feedline.Order(shuffle=False)
    reading = feedline.Reading(workers=2)
    with feedline.Feed("x.npy", 8, sharding, order=order, epochs=1, prefetch={prefetch}, reading=reading) as feed:
        rows = [np.asarray(next(feed)) for _ in range(9)]  # both workers are there
        try:
            os.killpg(0, signal.SIGINT)
            threading.Event().wait()
        except KeyboardInterrupt:
            rows += [np.asarray(batch) for batch in feed]
    print(np.concatenate(rows).tolist() == list(range(800)))
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_forked_process_that_ends_does_not_end_the_workers_of_its_parent(tmp_path, prefetch):
    done, _ = run(
        tmp_path,
        f"""
import multiprocessing, time

def slow(batch, rows):
    time.sleep(0.02)
    return batch

if __name__ == "__main__":
    np.save("x.npy", np.arange(800))
    reading = feedline.Reading(workers=1)
    feed = feedline.Feed("x.npy", 8, sharding, prefetch={prefetch}, reading=reading, transform=slow)
    next(feed)
    if os.fork() == 0:
        del feed
        os._exit(0)
    os.wait()
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    for _ in range(30):  # more than was read ahead
        next(feed)
    feed.close()
    print("child", child.exitcode)
""",
        flags=("-W", "ignore"),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "child 0\n", "")
