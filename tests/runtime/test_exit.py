"""How a process ends: with an open feed, with reads that never return, with workers that die or have no guard."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BEFORE = """
import os, signal, sys, threading, time
import jax, numpy as np
import feedline
from jax.sharding import Mesh, NamedSharding, PartitionSpec
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
"""


def run(tmp_path, body, *, timeout_s=180, flags=("-W", "error"), before=()):
    """Run a script. Returns its result and the seconds from its last line to the end of all its processes.

    These are the script, its child processes and Python's resource tracker. The tracker warns of leaked shared
    memory; with `-W error` that warning is raised inside the tracker and not shown.
    """
    script = tmp_path / "script.py"
    script.write_text(f"{BEFORE}{body}")
    done = subprocess.run(
        [*before, sys.executable, *flags, script], capture_output=True, text=True, timeout=timeout_s, cwd=tmp_path
    )
    ended = time.time()
    ends = [line for line in done.stdout.splitlines() if line.startswith("end ")]
    return done, ended - float(ends[-1].split()[1]) if ends else None


def exits_within_2_s(tmp_path, body, measured=None):
    """Run a script up to three times: a busy machine may delay one end, a thread that is joined delays all."""
    for _ in range(3):
        done, delay_s = run(tmp_path, body)
        assert (done.returncode, done.stderr) == (0, "")
        if delay_s < 2:
            if measured:
                measured("a feed that nobody closes", delay_s)
            return done
    pytest.fail(f"the process ended {delay_s:.1f} s after its last line, three times in a row more than 2 s")


READS = {
    "idle": "lambda i: {'x': np.float32(i)}",
    "slow": "lambda i: time.sleep(0.3) or {'x': np.float32(i)}",
    "never returns": "lambda i: threading.Event().wait() if 20 < i < 48 else {'x': np.float32(i)}",
}


@pytest.mark.parametrize("read", READS)
def test_a_feed_that_was_not_closed_does_not_delay_the_exit(tmp_path, read, measured):
    exits_within_2_s(
        tmp_path,
        f"""
import grain
rows = grain.MapDataset.range(100).map({READS[read]})
feed = feedline.Feed(rows, 8, sharding)
next(feed), next(feed)
print("end", time.time(), flush=True)
""",
        measured,
    )


def test_a_stream_whose_read_never_returns_does_not_delay_the_exit(tmp_path):
    exits_within_2_s(
        tmp_path,
        f"""
import grain
rows = grain.MapDataset.range(100).map({READS["never returns"]}).to_iter_dataset(grain.ReadOptions(2, 4))
feed = feedline.Feed(rows, 8, sharding)
next(feed)
print("end", time.time(), flush=True)
""",
    )


def test_a_read_left_behind_by_a_closed_feed_ends_before_the_interpreter(tmp_path):
    done, _ = run(
        tmp_path,
        """
import atexit, grain, logging
logging.getLogger("feedline").setLevel("ERROR")
atexit.register(lambda: print("left", [t.name for t in threading.enumerate() if "-read-" in t.name]))
rows = grain.MapDataset.range(100).map(lambda i: time.sleep(0.02) or {"x": np.float32(i)})
feed = feedline.Feed(rows, 8, sharding)
next(feed)
feed.close(timeout_s=0)
assert any("-read-" in t.name for t in threading.enumerate())  # busy with a batch that nobody takes
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left []\n", "")


def test_a_long_read_of_many_chunks_ends_before_the_interpreter(tmp_path):
    """Otherwise the interpreter ends its thread inside TensorStore, which sometimes aborts the process."""
    done = exits_within_2_s(
        tmp_path,
        """
import atexit, tensorstore
from feedline.sources.formats.lru_cache import LruCache
inside = threading.Event()
def slowly(kept, key, read, get=LruCache.get):
    inside.set()
    time.sleep(0.03)
    return get(kept, key, read)
metadata = {"shape": [256, 4], "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 4]}}}
store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": "x.zarr/"}, "metadata": metadata}
tensorstore.open(store, create=True, delete_existing=True).result()[...] = np.ones((256, 4), np.float32)
feed = feedline.Feed(feedline.open_source("x.zarr", cache_bytes=1), 128, sharding)
next(feed)
LruCache.get = slowly
atexit.register(lambda: print("left", [t.name for t in threading.enumerate() if "-read-" in t.name]))
next(feed), next(feed), next(feed)  # the next read takes four seconds
assert inside.wait(30)
print("end", time.time(), flush=True)
""",
    )
    assert done.stdout.splitlines()[-1] == "left []"


def test_only_the_exception_of_the_main_thread_is_shown(tmp_path):
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


WATCHED = {
    "a feed, for the step": """
feed = feedline.Feed(np.zeros((64, 2)), 8, sharding, prefetch=0)
next(feed)
time.sleep(0.2)  # until the next look at the devices is due
step = slow(rows)
next(feed)
""",
    "the transfer of a batch": """
from feedline.observe.devices import TransferWatch
watch = TransferWatch(print)
step = slow(rows)
watch([step], time.perf_counter())
del watch
""",
}


@pytest.mark.parametrize("watches", WATCHED)
def test_a_program_that_ends_while_the_devices_compute_is_not_aborted(tmp_path, watches):
    """Threads that wait for the devices inside jax must have left it when the interpreter ends."""
    done, _ = run(
        tmp_path,
        f"""
import atexit
slow = jax.jit(lambda a: jax.lax.fori_loop(0, 2000, lambda i, a: jax.numpy.sin(a @ a), a))
rows = jax.numpy.ones((200, 200))
slow.lower(rows).compile()
{WATCHED[watches]}
time.sleep(0.1)
assert not step.is_ready()
""",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_iterator_whose_close_raises_does_not_keep_the_others_from_being_closed(tmp_path):
    done, _ = run(
        tmp_path,
        """
class Numbers:
    def __init__(self, name):
        self.name = name
    def __iter__(self):
        return self
    def __next__(self):
        return np.zeros(8)
    def close(self):
        print("closing", self.name, flush=True)
        raise OSError(self.name)
batches = [feedline.prefetch_to_mesh(Numbers(name), sharding, 0) for name in ("first", "second")]
for each in batches:
    next(each)
""",
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["closing first", "closing second"]
    told = "closing a feed at the end of the program failed: OSError"
    assert sorted(done.stderr.splitlines()) == [f"{told}('first')", f"{told}('second')"]


WORKERS = """
import multiprocessing
def main():
    np.save("x.npy", np.arange(6400, dtype=np.float32).reshape(1600, 4))  # here: workers import the script, too
    feed = feedline.Feed({"x": "x.npy"}, 8, sharding, reading=feedline.Reading(workers=2))
    next(feed)
    workers = [child.pid for child in multiprocessing.active_children() if "grain" in child.name]
    print("workers", *workers, flush=True)
    return feed, workers
"""


SHARED = """
    with open("/proc/self/maps") as file:
        maps = file.read().split()
    print("shared", *{word.removeprefix("/dev/shm/") for word in maps if word.startswith("/dev/shm/")}, flush=True)
"""


def test_a_script_that_rewrites_its_file_in_each_worker_gets_an_error(tmp_path):
    script = """
np.save("x.npy", np.arange(64, dtype=np.float32))
if __name__ == "__main__":
    with feedline.Feed({"x": "x.npy"}, 8, sharding, reading=feedline.Reading(workers=1)) as feed:
        next(feed)
"""
    done, _ = run(tmp_path, script)
    assert done.returncode == 1
    message = "A worker process imports your script again: what writes the file must stand under `if __name__ =="
    assert message in done.stderr


@pytest.mark.parametrize("end", ["", "feed.close()", "feed.close(); del batch"])
def test_workers_leave_no_process_and_no_shared_memory(tmp_path, end):
    body = f"""
if __name__ == "__main__":
    feed, workers = main()
    batch = next(feed)
{SHARED}
    {end}
    print("closed", *[name for name in os.listdir("/dev/shm") if f"feedline-{{os.getpid()}}-" in name])
"""
    done, _ = run(tmp_path, WORKERS + body, flags=())
    assert (done.returncode, done.stderr) == (0, "")  # nor does the resource tracker tell of any
    assert len(_said(done, "workers")) == 2
    assert not any(Path("/proc", pid).exists() for pid in _said(done, "workers"))
    assert any(name.startswith("feedline-") for name in _said(done, "shared"))  # a batch did come that way
    assert not any(Path("/dev/shm", name).exists() for name in _said(done, "shared"))
    if end:
        assert _said(done, "closed") == []


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
{SHARED}
    print("mine", os.getpid())
    print("end", time.time(), flush=True)
    {how}
"""
    # without -W error: with it, Python's resource tracker stops cleaning up at the first name that is gone, and
    # the kill may come between the removal of a name and its notice to the tracker
    done, delay_s = run(tmp_path, WORKERS + body, flags=())
    assert done.returncode == code
    assert delay_s < 10  # and nobody holds standard output or standard error any more
    assert not any(_runs(pid) for pid in _said(done, "workers"))
    shared = _said(done, "shared")
    assert any(name.startswith("sem.") for name in shared)
    assert not any(Path("/dev/shm", name).exists() for name in shared)
    assert not list(Path("/dev/shm").glob(f"feedline-{_said(done, 'mine')[0]}-*"))
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
    "has a bus error": ("os.kill(os.getpid(), signal.SIGBUS)", "exit code -7: .* or /dev/shm is full .* 64 MB"),
    "exits with 0": ("os._exit(0)", r"exit code 0: .* look for sys\.exit, os\._exit"),
    "is told to exit with 0": ("sys.exit(0)", r"exit code 0: something that it ran"),
    "exits with 3": ("os._exit(3)", "exit code 3: look at what it printed"),
}


def test_a_garbage_collection_in_the_resource_tracker_frees_no_semaphore_of_ended_workers(tmp_path):
    """Python's resource tracker cannot be called from within itself, but garbage may be collected there."""
    done, _ = run(
        tmp_path,
        """
if __name__ == "__main__":
    import gc
    from multiprocessing import resource_tracker
    gc.disable()
    gc.freeze()  # collections look at what comes from here on only, so they are quick
    tracker = resource_tracker._resource_tracker
    alive = tracker._check_alive  # called with the tracker's lock held
    tracker._check_alive = lambda: gc.collect() >= 0 and alive()
    np.save("x.npy", np.arange(160, dtype=np.float32))
def leave(batch, rows):
    if 80 in rows.index and len(rows.index) > 1 and not os.path.exists("left"):
        open("left", "w").close()
        os._exit(0)
    return batch
if __name__ == "__main__":
    feed = feedline.Feed(
        {"x": "x.npy"}, 8, sharding, order=feedline.Order(shuffle=False), transform=leave, epochs=1,
        reading=feedline.Reading(workers=2),
    )
    try:
        for batch in feed:
            pass
    except feedline.WorkerError:
        print("ended")
    for batch in feed:  # from new workers
        pass
    feed.close()
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


@pytest.mark.parametrize("how", ENDS)
def test_a_worker_that_ends_early_is_an_error_within_seconds(tmp_path, how):
    ends, message = ENDS[how]
    workers = 2 if how == "is killed" else 1  # another one that lives on, or none
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
    assert "__main__" not in line  # the guard is there: workers delivered batches


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("size", ["2m", "64k"])  # no room for batches; not even for the workers' semaphores
def test_shared_memory_that_is_full_is_named(tmp_path, size):
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    done, _ = run(
        tmp_path,
        """
if __name__ == "__main__":
    np.save("x.npy", np.zeros((4, 1 << 20), np.uint8))
if __name__ == "__main__":
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with feedline.Feed({"x": "x.npy"}, 4, one, reading=feedline.Reading(workers=2)) as feed:
        try:
            next(feed)
        except feedline.WorkerError as error:
            print(error)
""",
        before=("unshare", "--mount", "sh", "-c", mount, "sh"),
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"a mount of one's own is not allowed here: {done.stderr}")
    assert done.returncode == 0
    assert done.stdout.startswith(
        "workers hand batches over in /dev/shm, which must have room for them: [Errno 28]"
    )
    assert "Docker gives it 64 MB unless a container is started with, for example, --shm-size=8g" in done.stdout
    if size == "2m":
        assert "it has 2,097,152 bytes, of which" in done.stdout
        assert "and a batch takes 4,194,304 bytes" in done.stdout


def test_a_script_without_a_main_guard_gets_an_error(tmp_path):
    done, _ = run(tmp_path, f"{WORKERS}\nmain()\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("feedline.errors.WorkerError: a worker process must live")
    assert 'must build and run its feed under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert "was built while a worker process imports your script" in done.stderr


def test_a_feed_is_refused_in_a_forked_process_and_continues_in_the_parent(tmp_path):
    done, _ = run(
        tmp_path,
        """
feed = feedline.Feed(np.arange(800), 8, sharding)
next(feed)
sys.stdout.flush()
if os.fork() == 0:
    for call in (lambda: next(feed), lambda: iter(feed), lambda: feed.seek(0)):
        try:
            call()
        except ValueError as error:
            print(error)
    feed.close()
    print("state", feed.get_state()["step"], flush=True)
    os._exit(0)  # JAX's own end may hang in a forked process
os.wait()
next(feed)
print("went on", feed.get_state()["step"])
feed.close()
""",
        flags=("-W", "ignore"),  # Python and JAX warn of a fork beside threads
    )
    assert (done.returncode, done.stderr) == (0, "")
    *message, state, parent = done.stdout.splitlines()
    assert [line.startswith("a feed works in the process that built it, ") for line in message] == [True] * 3
    assert "a fork of it: threads, JAX's too, do not survive a fork. Start the process by mult" in message[0]
    assert (state, parent) == ("state 1", "went on 2")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_ctrl_c_that_the_program_catches_does_not_end_its_workers(tmp_path, prefetch):
    """A terminal sends it to all processes of the program."""
    done, _ = run(
        tmp_path,
        f"""
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgrp()
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
import multiprocessing
if __name__ == "__main__":
    np.save("x.npy", np.arange(800))
    feed = feedline.Feed("x.npy", 8, sharding, prefetch={prefetch}, reading=feedline.Reading(workers=1))
    next(feed)
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


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prefetch_to_mesh_is_refused_in_a_forked_process_and_continues_in_the_parent(tmp_path, prefetch):
    done, _ = run(
        tmp_path,
        f"""
batches = feedline.prefetch_to_mesh((np.full(8, i) for i in range(9)), sharding, {prefetch})
next(batches)
sys.stdout.flush()
if os.fork() == 0:
    try:
        next(batches)
    except ValueError as error:
        print(error, flush=True)
    batches.close()
    os._exit(0)  # JAX's own end may hang in a forked process
os.wait()
print("went on", int(next(batches)[0]))
batches.close()
""",
        flags=("-W", "ignore"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    message, parent = done.stdout.splitlines()
    assert message.startswith("the iterator of prefetch_to_mesh works in the process that built it, ")
    assert message.endswith('"spawn"), and there call prefetch_to_mesh again, with an iterator of its own')
    assert parent == "went on 1"
