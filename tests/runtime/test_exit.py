"""How a process ends: with an open feed, with reads that never return, while devices compute, in a fork."""

import h5py
import numpy as np
import pytest
from script_runs import run

pytestmark = pytest.mark.slow


def exits_within_2_s(tmp_path, body, measured=None, status=0, says=""):
    """Run a script up to three times: a busy machine may delay one exit, a thread that is joined delays all."""
    for _ in range(3):
        done, delay_s = run(tmp_path, body)
        assert (done.returncode, done.stderr) == (status, says)
        if delay_s < 2:
            if measured:
                measured("a feed that nobody closes", delay_s)
            return done
    pytest.fail(f"the process ended {delay_s:.1f} s after its last line, three times in a row more than 2 s")


ROWS = "grain.MapDataset.range(100).map(lambda i: {})"
NEVER = ROWS.format("threading.Event().wait() if 20 < i < 48 else {'x': np.float32(i)}")
READS = {
    "idle": ROWS.format("{'x': np.float32(i)}"),
    "slow": ROWS.format("time.sleep(0.3) or {'x': np.float32(i)}"),
    "never returns": NEVER,
    "of a stream never returns": f"{NEVER}.to_iter_dataset(grain.ReadOptions(2, 4))",
}


@pytest.mark.parametrize("read", READS)
def test_a_feed_that_was_not_closed_does_not_delay_the_exit(tmp_path, read, measured):
    exits_within_2_s(
        tmp_path,
        f"""
import grain
feed = feedline.Feed({READS[read]}, 8, sharding)
next(feed)
print("end", time.time(), flush=True)
""",
        measured,
    )


def test_a_read_of_hdf5_that_never_returns_does_not_delay_the_exit(tmp_path):
    """Threads that end inside HDF5 keep its lock, and h5py's own exit hook waits for this lock without a limit."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(800), chunks=(8,))
    says = (
        "feedline: a read of an HDF5 file had not ended 1 s after the program's end, so the process exits with "
        "status 1, without other exit hooks; close feeds before the program ends\n"
    )
    done = exits_within_2_s(
        tmp_path,
        """
from feedline._src.formats import hdf5
usual, inside = hdf5._read_from, threading.Event()
def read_from(file, leaf, rows):
    if rows.start >= 24:  # of the fourth batch, which is read ahead
        inside.set()
        threading.Event().wait()
    return usual(file, leaf, rows)
hdf5._read_from = read_from
source = feedline.open_source("x.h5", cache_bytes=0)
feed = feedline.Feed(source, 8, sharding, order=feedline.Order(shuffle=False))
next(feed)
assert inside.wait(60)
print("buffered")
sys.stdout.write(f"end {time.time()}")
""",
        status=1,
        says=says,
    )
    assert "buffered" in done.stdout


def test_a_read_left_behind_by_a_closed_feed_ends_before_the_interpreter(tmp_path):
    done, _ = run(
        tmp_path,
        """
import atexit, grain, logging
logging.getLogger("feedline").setLevel("ERROR")
atexit.register(lambda: print("left", [t.name for t in threading.enumerate() if "-read-" in t.name]))
inside, closed = threading.Event(), threading.Event()
def read(i):
    if i >= 8 and "-read-" in threading.current_thread().name:
        inside.set(), closed.wait(), time.sleep(0.02)
    return {"x": np.float32(i)}
feed = feedline.Feed(grain.MapDataset.range(100).map(read), 8, sharding)
next(feed)
inside.wait()
feed.close(timeout_s=0)
assert any("-read-" in t.name for t in threading.enumerate())  # busy with a batch that nobody takes
closed.set()
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left []\n", "")


def test_a_long_read_of_many_chunks_ends_before_the_interpreter(tmp_path):
    """Otherwise the interpreter ends the reading thread inside TensorStore, and sometimes the process aborts."""
    done = exits_within_2_s(
        tmp_path,
        """
import atexit, tensorstore
from feedline._src.files.file import LruCache
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


WATCHED = {
    "a feed, for the step": """
feed = feedline.Feed(np.zeros((64, 2)), 8, sharding, prefetch=0)
next(feed)
time.sleep(0.2)  # until the next look at the devices is due
step = slow(rows)
next(feed)
""",
    "the transfer of a batch": """
from feedline._src.listen.devices import TransferWatch
watch = TransferWatch(print)
step = slow(rows)
watch([step], time.perf_counter())
del watch
""",
}


@pytest.mark.parametrize("watches", WATCHED)
def test_a_program_that_ends_while_the_devices_compute_is_not_aborted(tmp_path, watches):
    """Threads that wait for the devices inside jax must have left jax when the interpreter ends."""
    script = f"""
import atexit
slow = jax.jit(lambda a: jax.lax.fori_loop(0, 700, lambda i, a: jax.numpy.sin(a @ a), a))
rows = jax.numpy.ones((200, 200))
slow.lower(rows).compile()
{WATCHED[watches]}
time.sleep(0.1)
print(step.is_ready())
"""
    for _ in range(5):
        done, _ = run(tmp_path, script)
        assert (done.returncode, done.stderr) == (0, "")
        if "False" in done.stdout.split():  # the devices still computed at the end
            return
    pytest.fail("the devices never computed when the program ended")


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
    assert "a fork of it, and threads do not survive a fork, not even JAX's. Start the process" in message[0]
    assert (state, parent) == ("state 1", "went on 2")
