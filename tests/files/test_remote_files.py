"""Files in a store have the bytes of the object, whatever happens to the cache, and cost no needless requests."""

import asyncio
import contextlib
import dataclasses
import fcntl
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import programs
import pytest
from background import PATIENCE_S, arrived, at_once, spawn
from stored import BLOCK, RECORDS, array_record

import feedline
from feedline._src.files.cached_range import CachedRange
from feedline._src.files.fetcher import fetcher
from feedline._src.files.file import File, Version, digests_of
from feedline._src.files.files import Files
from feedline._src.files.folder import folder_at
from feedline._src.native.library import library

DATA = np.random.default_rng(0).integers(0, 256, 11 * BLOCK // 2, np.uint8).tobytes()
needs_c = pytest.mark.skipif(library() is None, reason="without the C library nothing is mapped")


@pytest.fixture
def url(store):
    store.objects["/x.bin"] = DATA
    return f"{store.url}/x.bin"


@pytest.fixture(params=["one piece", "six pieces"])
def options(request, tmp_path):
    """A cache whose pieces hold 64 MiB, or one block."""
    limit = (1 << 40) if request.param == "one piece" else 64 << 20
    return feedline.Store(cache=tmp_path / "cache", cache_bytes=limit, patience_s=100)


def opened(url, options):
    return Files([url], options)[0]


def opened_elsewhere(url, options):
    """Open the object with another `Cache` over the same folder, as another process does."""
    return opened(url, dataclasses.replace(options, cache_bytes=options.cache_bytes + 1))


def parts(count=60, seed=1, most=3000):
    random = np.random.default_rng(seed)
    return random.integers(0, len(DATA), count), random.integers(0, most, count)


def reads_all(file, seed=1):
    for offsets, lengths in (parts(seed=seed), parts(5, seed, 3 * BLOCK)):
        expected = [DATA[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
        assert file.read(offsets, lengths) == expected
    offsets = np.append(parts(seed=seed)[0] % (len(DATA) - 700), np.arange(BLOCK - 1400, BLOCK + 1400, 700))
    out = np.zeros((len(offsets), 700), np.uint8)
    file.read_rows(offsets, out)
    assert [bytes(row) for row in out] == [DATA[at : at + 700] for at in offsets.tolist()]


def cache_files(folder):
    """The files of the cache that hold blocks, not those that hold samples."""
    with contextlib.suppress(FileNotFoundError):
        return [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size >= BLOCK // 2]
    return []


def test_a_file_in_a_store_is_read_as_a_local_one(url, options, tmp_path):
    file = opened(url, options)
    (tmp_path / "x.bin").write_bytes(DATA)
    local = File(str(tmp_path / "x.bin"))
    for each in (file, pickle.loads(pickle.dumps(Files([url], options)))[0]):
        each.read_rows(np.array([5, 7]), np.zeros((2, 0), np.uint8))  # rows of no bytes
        assert digests_of([each]) == digests_of([local])
        reads_all(each)
        assert each.samples([(5, 9), (len(DATA) - 3, 9), (len(DATA) + 9, 1)]) == [DATA[5:14], DATA[-3:], b""]
        for sequential in (False, True):
            with each.open(sequential) as read:
                assert read.read(100) == DATA[:100]
                assert read.seek(-50, os.SEEK_END) == len(DATA) - 50
                assert read.read() == DATA[-50:]
        with pytest.raises(feedline.FeedError, match="too early"):
            each.read_rows(np.array([len(DATA) - 3]), np.zeros((1, 5), np.uint8))
        assert each.with_path(lambda local: Path(local).read_bytes()) == DATA


def test_what_one_source_fetched_serves_the_next_and_is_fetched_once(store, url, options):
    reads_all(opened(url, options))
    asked = [(start, stop) for start, stop in store.gets()]
    assert sum(stop - start for start, stop in asked) <= len(DATA)
    assert max(stop - start for start, stop in asked) <= 2 * BLOCK
    store.requests.clear()
    reads_all(opened_elsewhere(url, options))
    assert [method for method, *_ in store.requests] == ["HEAD"]


@needs_c
def test_memory_is_there_while_the_cache_has_all_blocks(store, url, options):
    file = opened(url, options)
    assert file.memory() is None
    file.read(np.array([0]), np.array([10]))
    assert file.memory() is None
    file.read(np.array([0]), np.array([len(DATA)]))
    memory = file.memory()
    assert memory is file.memory()
    assert bytes(memory) == DATA
    assert not memory.flags.writeable
    shutil.rmtree(options.cache)
    file.check()
    assert file.memory() is None
    row = memory[10:20]
    del memory
    assert bytes(row) == DATA[10:20], "it stays as long as somebody refers to it"
    del row
    wait_until(lambda: str(options.cache) not in Path("/proc/self/maps").read_text())
    store.requests.clear()
    reads_all(file)
    assert store.gets()
    file.read(np.array([0]), np.array([len(DATA)]))
    assert bytes(file.memory()) == DATA


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def shorter_and_longer(path):
    size = path.stat().st_size
    os.truncate(path, 9)
    os.truncate(path, size)
    os.utime(path, ns=(1, 1))  # another time, however coarse the clock is


DAMAGE = {
    "truncated to nothing": lambda path: os.truncate(path, 0),
    "truncated by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "truncated in a block": lambda path: os.truncate(path, 1000),
    "deleted": lambda path: path.unlink(),
    "truncated and longer again": shorter_and_longer,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("when", ["in use", "before it is opened"])
def test_files_of_the_cache_that_are_damaged_are_fetched_again(url, options, damage, when):
    file = opened(url, options)
    reads_all(file)
    for path in cache_files(options.cache):
        DAMAGE[damage](path)
    if when == "before it is opened":
        file = opened_elsewhere(url, options)
    reads_all(file)
    reads_all(file, seed=7)
    reads_all(opened_elsewhere(url, options))


def overwritten(path):
    with path.open("r+b") as file:
        file.write(bytes(range(256)))
    os.utime(path, ns=(1, 1))


@needs_c
@pytest.mark.parametrize("damage", [*DAMAGE, "overwritten"])
def test_a_mapped_object_is_fetched_again_where_its_files_are_damaged(store, options, damage):
    rows = np.frombuffer(DATA, np.uint8).reshape(-1, 1 << 19)
    store.objects["/x.bin"] = DATA
    source = feedline.open_source(f"{store.url}/x.bin", dtype=np.dtype((np.uint8, 1 << 19)), store=options)
    out, order = np.empty_like(rows), np.random.default_rng(1).permutation(len(rows))
    for _ in range(3):
        source.read(order, out)
        np.testing.assert_array_equal(out, rows[order])
        assert source._opened[0].memory() is not None
        for path in cache_files(options.cache)[:1]:
            DAMAGE.get(damage, overwritten)(path)
        for _ in range(6 if damage == "truncated and longer again" else 0):  # each read checks one piece
            source.read(order, out)


def deleted_and_open(options):
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(f"/proc/self/fd/{number}")
            yield path.startswith(str(options.cache)) and path.endswith("(deleted)")


def test_what_a_process_evicts_gives_back_its_space_at_once(store, tmp_path):
    store.objects |= {"/x.bin": DATA, "/y.bin": DATA}
    options = feedline.Store(cache=tmp_path, cache_bytes=4 * BLOCK)
    files = [opened(f"{store.url}/{name}.bin", options) for name in "xy"]
    for at in [*range(0, len(DATA), BLOCK), 0]:
        for file in files:
            assert file.read(np.array([at]), np.array([10])) == [DATA[at : at + 10]]
            assert not any(deleted_and_open(options))
    assert len(cache_files(tmp_path)) < 6


def test_what_will_be_read_is_fetched_within_a_quarter_of_the_cache(store, tmp_path):
    store.objects["/x.bin"] = bytes(64 * BLOCK)
    files = Files([f"{store.url}/x.bin"], feedline.Store(cache=tmp_path, cache_bytes=32 * BLOCK))

    def blocks(first, count):
        return [(0, BLOCK * np.arange(first, first + count), np.full(count, BLOCK))]

    assert files.will_read(blocks(0, 4), 0)
    assert files.will_read(blocks(4, 4), 1)
    assert not files.will_read(blocks(8, 4), 2)
    assert files[0].read(np.array([0]), np.array([8 * BLOCK])) == [bytes(8 * BLOCK)]
    assert sum(stop - start for start, stop in store.gets()) == 8 * BLOCK
    files.close()


def test_a_closed_source_gives_up_its_requests_and_is_read_again(store, url, options):
    files, reached = Files([url], options), threading.Event()
    store.fault = lambda *request: (reached.set(), 503)[1]
    reading = spawn(lambda: files[0].read(np.array([0]), np.array([10])))
    arrived(reached)
    files.close()
    with pytest.raises(feedline.FeedError, match="closed during a read"):
        reading.result(PATIENCE_S)
    wait_until(is_quiet)
    store.fault = lambda *request: None
    reads_all(files[0])


def is_quiet():
    """Whether no request is in flight. A request that is repeated after errors stays in flight for 100 s."""
    return not asyncio.all_tasks(fetcher()._loop)


def test_objects_without_bytes(store, options):
    store.objects["/empty"] = b""
    file = opened(f"{store.url}/empty", options)
    assert file.read(np.array([0, 3]), np.array([5, 0])) == [b"", b""]
    assert file.samples([(0, 3)]) == [b""]
    assert file.with_path(lambda local: Path(local).read_bytes()) == b""
    with file.open() as read:
        assert read.read() == b""


READER = """
import sys, time, numpy as np, feedline
from feedline._src.files.files import Files
from feedline._src.native.gather import RowGather
from feedline._src.native.library import library
url, cache, cache_bytes, seed = sys.argv[1:]
data = np.load(sys.stdin.buffer)
random = np.random.default_rng(int(seed))
mapped = 0
print("ready", flush=True)
end = time.monotonic() + 6
while time.monotonic() < end or (library() is not None and not mapped):
    file = Files([url], feedline.Store(cache=cache, cache_bytes=int(cache_bytes)))[0]
    for _ in range(20):
        offsets = random.integers(0, len(data) - 3000, 40)
        out = np.empty((40, 3000), np.uint8)
        memory = file.memory()
        if memory is not None:
            rows = np.lib.stride_tricks.sliding_window_view(memory, 3000)
            try:
                RowGather([rows]).read(offsets, (slice(None),), out)
            except feedline.FeedError:
                file.check()
                memory = None
            mapped += memory is not None
        if memory is None:
            file.read_rows(offsets, out)
            np.testing.assert_array_equal(out, data[offsets[:, None] + np.arange(3000)])
        file.read(np.arange(0, len(data), 1 << 21), np.full(-(-len(data) // (1 << 21)), 1))
print("mapped", mapped)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pieces", ["one", "several"])
@pytest.mark.parametrize("pure", ["0", "1"])
def test_no_process_dies_whoever_deletes_and_truncates_files_of_the_cache(store, tmp_path, pieces, pure):
    """Three processes read and a fourth is killed, while files of the cache are truncated and deleted."""
    store.objects["/x.bin"] = DATA
    data = np.frombuffer(DATA, np.uint8)
    np.save(tmp_path / "rows.npy", data)
    cache = tmp_path / "cache"
    limit = str(1 << 40 if pieces == "one" else 64 << 20)
    command = [sys.executable, "-c", READER, f"{store.url}/x.bin", str(cache), limit]
    environment = {**os.environ, "FEEDLINE_PURE_PYTHON": pure}
    done = threading.Event()

    def destroy():
        random, end = np.random.default_rng(3), time.monotonic() + 8
        for i in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
            if done.wait(0.02):
                return
            for path in cache_files(cache):
                with contextlib.suppress(OSError):
                    [*DAMAGE.values()][random.integers(len(DAMAGE))](path) if random.random() < 0.5 else None
            if i % 25 == 24:
                shutil.rmtree(cache, ignore_errors=True)

    with contextlib.ExitStack() as stack:

        def start(seed):
            given = stack.enter_context(open(tmp_path / "rows.npy", "rb"))
            return stack.enter_context(
                programs.started(
                    [*command, str(seed)], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env=environment,
                )
            )  # fmt: skip

        readers, killed = [start(seed) for seed in range(3)], start(9)
        for each in (*readers, killed):
            assert each.stdout.readline() == "ready\n"
        destroyer = threading.Thread(target=destroy)
        destroyer.start()
        killed.kill()
        ended = [each.communicate(timeout=120) for each in readers]
        done.set()
        destroyer.join()
    assert [(each.returncode, error) for each, (_, error) in zip(readers, ended, strict=True)] == [(0, "")] * 3
    mapped = [int(out.split()[-1]) for out, _ in ended]
    assert (sum(mapped) > 0) == (pure == "0" and library() is not None)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_no_wrong_block(store, url, tmp_path):
    """It is killed inside its second block: half of the block's bytes are there, and no mark."""
    script = """
import os, sys, numpy as np, feedline
from feedline._src.files.files import Files
file = Files([sys.argv[1]], feedline.Store(cache=sys.argv[2]))[0]
file.read(np.array([0]), np.array([9]))
write = os.pwrite
def half(descriptor, data, at):
    if len(data) < 1000:
        return write(descriptor, data, at)
    write(descriptor, bytes(len(data) // 2), at)
    os.kill(os.getpid(), 9)
os.pwrite = half
file.read(np.array([1 << 21]), np.array([9]))
"""
    ended = programs.run([sys.executable, "-c", script, url, str(tmp_path / "c")], capture_output=True, timeout=60)
    assert ended.returncode == -9
    store.requests.clear()
    file = opened(url, feedline.Store(cache=tmp_path / "c"))
    assert file.read(np.array([0, BLOCK]), np.array([9, BLOCK])) == [DATA[:9], DATA[BLOCK : 2 * BLOCK]]
    assert store.gets() == [(BLOCK, 2 * BLOCK)]


@pytest.mark.slow
def test_a_fork_reads_what_is_there_and_waits_for_no_request_of_its_parent(store, url, tmp_path):
    script = """
import os, sys, numpy as np, feedline
from feedline._src.files.files import Files
files = Files([sys.argv[1]], feedline.Store(cache=sys.argv[2]))
first, second = (np.array([at]) for at in (0, 2 << 21))
files[0].read(first, first + 9)
files.will_read([(0, second, first + 9)], 0)  # this request ends once the fork has ended
if os.fork() == 0:
    assert len(files[0].read(first, first + 9)[0]) == 9
    try:
        files[0].read(second, first + 9)
    except feedline.FeedError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    store.fault = lambda method, path, part: 30.0 if part and part[0] >= 2 * BLOCK else None
    command = [sys.executable, "-W", "ignore", "-c", script, url, str(tmp_path / "c")]
    ended = programs.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout.startswith("the threads that read stores do not survive a fork"), ended.stderr


# --- requests ---


@pytest.mark.parametrize("late", [False, True])
def test_after_an_error_nothing_more_is_asked_for(store, options, monkeypatch, late):
    """A request for one part fails at once (404); requests for other parts (503) would be repeated for 100 s.

    Late: the thread of the other object begins its requests after those of all objects were cancelled.
    """
    for name in "ab":
        store.objects[f"/{name}.bin"] = bytes(12 << 20)
    files = Files([f"{store.url}/a.bin", f"{store.url}/b.bin"], options)
    cancelled, ended = threading.Event(), threading.Event()
    usual_open, usual_whole = CachedRange.open, CachedRange.whole

    def open_late(self):
        if late and self is files[1]._bytes:
            arrived(cancelled)
        return usual_open(self)

    def whole(self, *arguments):
        try:
            return usual_whole(self, *arguments)
        finally:
            if self is files[1]._bytes:
                ended.set()

    def fault(method, path, part):
        return None if method == "HEAD" else 404 if path == "/a.bin" and not part[0] else 503

    store.fault = fault
    monkeypatch.setattr(CachedRange, "open", open_late)
    monkeypatch.setattr(CachedRange, "whole", whole)
    with pytest.raises(feedline.FeedError, match="it no longer exists"):
        files.fetch_whole()
    cancelled.set()
    arrived(ended)
    wait_until(is_quiet)


def test_a_file_that_is_gone_does_not_disturb_the_reads_of_others(store, options):
    store.objects["/a"], asked = b"bytes", threading.Event()
    folder = folder_at(store.url, options)
    folder.versions["gone"] = Version(1, "tag")
    store.fault = lambda method, path, part: (asked.set(), 0.5)[1] if path == "/a" else None
    reading = spawn(lambda: folder.read(["a"]))
    arrived(asked)
    with pytest.raises(feedline.FeedError, match="it no longer exists"):
        folder.read(["gone"])
    assert reading.result(PATIENCE_S) == [b"bytes"]


# --- whole objects ---


@pytest.fixture
def records(store, tmp_path):
    """The address of one of two ArrayRecord files of the same size; the other is /1.array_record."""
    for number in range(2):
        written = array_record(tmp_path / "written", [bytes([number]) * 60_000 for _ in range(60)])
        store.objects[f"/{number}.array_record"] = written
    return f"{store.url}/0.array_record"


def test_a_file_of_the_cache_that_always_changes_is_an_error(store, records, options):
    file = Files([records], options)[0]

    def truncates(local):
        os.truncate(local, 1000)
        raise ValueError("a bad row")

    with pytest.raises(feedline.FeedError, match=r"of a cache must .*0\.array_record were changed .* 10 times"):
        file.with_path(truncates)
    with pytest.raises(ValueError, match="invalid literal"):  # of `int`, not of the cache
        file.with_path(int)
    assert file.with_path(lambda local: Path(local).read_bytes()) == store.objects["/0.array_record"]


def test_a_file_in_use_is_not_evicted_and_others_are(store, records, tmp_path):
    size, other = len(store.objects["/0.array_record"]), records.replace("/0.", "/1.")
    options = feedline.Store(cache=tmp_path, cache_bytes=size + size // 2)
    first = feedline.open_source(records, store=options)
    with pytest.raises(feedline.FeedError, match=r"fit beside the \d+ bytes in use, with cache_bytes="):
        feedline.open_source(other, store=options)
    assert first[0] == bytes(60_000)
    first.close()
    assert feedline.open_source(other, store=options)[0] == b"\1" * 60_000
    assert len(list(tmp_path.rglob("*.whole"))) == 1
    with pytest.raises(feedline.FeedError, match=r"cache must hold all of them.*more than cache_bytes=1000000"):
        feedline.open_source(records, store=feedline.Store(cache=tmp_path, cache_bytes=1_000_000))


def test_a_cache_as_large_as_a_file_is_enough(store, tmp_path):
    data = store.objects["/x.array_record"] = array_record(tmp_path / "written")
    options = feedline.Store(cache=tmp_path / "c", cache_bytes=len(data))
    assert feedline.open_source(f"{store.url}/x.array_record", store=options)[0] == RECORDS[0]
    assert sum(stop - start for start, stop in store.gets()) == len(data)


@pytest.mark.parametrize("name", ["x.bin", "0.array_record"])
def test_sources_that_begin_with_an_empty_cache_all_read(store, records, tmp_path, name):
    """Each source has its own `Cache` over one folder, as in another process. A whole file is fetched once."""
    store.objects["/x.bin"] = DATA
    store.latency_s = 0.1
    data = store.objects[f"/{name}"]

    def read(number):
        options = feedline.Store(cache=tmp_path / "c", cache_bytes=(64 << 20) + number)
        file = opened(f"{store.url}/{name}", options)
        if name == "x.bin":
            return file, file.read(np.array([0]), np.array([len(data)])) == [data]
        return file, file.with_path(lambda local: Path(local).read_bytes()) == data

    assert [right for _, right in at_once(read, range(4))] == [True] * 4
    assert name == "x.bin" or sum(stop - start for start, stop in store.gets()) == len(data)


def test_a_whole_file_that_is_made_between_two_looks_is_not_fetched_again(store, records, tmp_path, monkeypatch):
    name, made, usual = "0.array_record", [], CachedRange.open
    one, two = (
        opened(f"{store.url}/{name}", feedline.Store(cache=tmp_path / "c", cache_bytes=(64 << 20) + number))
        for number in range(2)
    )

    def open_after_the_other(self):
        if self is two._bytes and not made:
            made.append(one.whole())
        return usual(self)

    monkeypatch.setattr(CachedRange, "open", open_after_the_other)
    assert Path(two.whole().path).read_bytes() == store.objects[f"/{name}"]
    assert made
    assert sum(stop - start for start, stop in store.gets()) == len(store.objects[f"/{name}"])


def test_a_file_that_becomes_whole_is_neither_deleted_nor_fetched_again(store, records, tmp_path, monkeypatch):
    name, waits, found, flock, truncate = "0.array_record", threading.Event(), [], fcntl.flock, os.ftruncate
    one, two = (
        opened(f"{store.url}/{name}", feedline.Store(cache=tmp_path / "c", cache_bytes=(64 << 20) + number))
        for number in range(2)
    )

    def noted(descriptor, operation):
        if operation == fcntl.LOCK_SH:
            waits.set()
        flock(descriptor, operation)

    def truncate_while_others_look(descriptor, size):
        found.append(spawn(two.whole))
        arrived(waits)
        truncate(descriptor, size)
        assert two._bytes.find() is None

    monkeypatch.setattr(fcntl, "flock", noted)
    monkeypatch.setattr(os, "ftruncate", truncate_while_others_look)
    paths = {one.whole().path, *(each.result(PATIENCE_S).path for each in found)}
    assert [Path(path).read_bytes() for path in paths] == [store.objects[f"/{name}"]]
    assert sum(stop - start for start, stop in store.gets()) == len(store.objects[f"/{name}"])


WHOLE = """
import sys
from feedline import Store
from feedline._src.files.files import Files
files = Files([sys.argv[1]], Store(cache=sys.argv[2]))
print(files[0].with_path(lambda path: len(open(path, "rb").read())), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_fetch_a_file_once(store, records, tmp_path):
    """One of them is killed while it fetches, and another one then fetches the file."""
    start, size = [sys.executable, "-c", WHOLE, records, tmp_path / "c"], len(store.objects["/0.array_record"])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    store.bytes_s = 1000.0
    with programs.started(start, **pipes) as killed:
        while len(store.gets()) < 1:
            time.sleep(0.01)
            assert killed.poll() is None
    store.bytes_s = None
    store.requests.clear()
    with programs.started(start, **pipes) as first, programs.started(start, **pipes) as second:
        assert [process.stdout.readline() for process in (first, second)] == [f"{size}\n"] * 2
    with programs.started(start, **pipes) as third:
        assert third.stdout.readline() == f"{size}\n"
    assert sum(stop - start for start, stop in store.gets()) == size
