"""What is asked of a store, how many at a time, and that nothing is asked for which nobody waits."""

import asyncio
import concurrent.futures
import os
import sys
import threading
import time

import numpy as np
import programs
import pytest
import tensorstore
from array_record.python.array_record_module import ArrayRecordWriter

import feedline
from feedline._src.files.cache import Cache
from feedline._src.files.fetcher import REQUEST_BYTES, fetcher
from feedline._src.files.files import Files
from feedline._src.files.folder import Folder, listing
from feedline._src.files.store import Url


def zarr(store, folder, name="x.zarr", chunks=64):
    """An array of one chunk a row, with `chunks` rows."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / name)}}
    array = tensorstore.open(
        spec, create=True, dtype=np.int64, shape=(chunks, 100),
        chunk_layout=tensorstore.ChunkLayout(write_chunk_shape=(1, 100)),
    ).result()  # fmt: skip
    array.write(np.arange(chunks * 100).reshape(chunks, 100) + 1).result()
    for path in (folder / name).rglob("*"):
        if path.is_file():
            store.objects[f"/{path.relative_to(folder)}"] = path.read_bytes()
    return f"{store.url}/{name}"


def test_a_closed_source_asks_for_nothing_more(store, options, tmp_path):
    """Not even again after errors, for as long as its patience lasts: 10 s."""
    source = feedline.open_source(zarr(store, tmp_path), store=options)
    store.fault = lambda method, path, part: 503 if "/c/" in path else None
    assert source.will_read(np.arange(64), 0)
    deadline = time.monotonic() + 10
    while fetcher().counts.retries < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    source.close()
    assert is_quiet()


def is_quiet():
    """Whether no request is under way, or soon. One that is tried again would be there for 10 s."""
    deadline = time.monotonic() + 5
    while (left := asyncio.all_tasks(fetcher()._loop)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def test_after_an_error_nothing_more_is_asked_for(store, options):
    """One part of an object is gone, and others would be asked for again while the patience lasts: 10 s."""
    for name in "ab":
        store.objects[f"/{name}.bin"] = bytes(12 << 20)
    files = Files([f"{store.url}/a.bin", f"{store.url}/b.bin"], options)
    folder = Folder(store.url, options)
    assert folder.sizes(["a.bin", "b.bin"]) == [12 << 20] * 2

    def fault(method, path, part):
        return None if method == "HEAD" else 404 if path == "/a.bin" and not part[0] else 503

    store.fault = fault
    for read in (files.local_paths, lambda: folder.read(["a.bin", "b.bin"])):
        with pytest.raises(feedline.FeedError, match="it is not there any more"):
            read()
        assert is_quiet()


def test_chunks_that_two_threads_want_are_asked_for_once(store, options, tmp_path):
    folder = Folder(zarr(store, tmp_path), options)
    chunks = [f"c/{row}/0" for row in range(64)]
    store.latency_s = 0.2
    assert folder.will_read(chunks, 0)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        both = [threads.submit(folder.read, chunks) for _ in range(2)]
        assert all(all(each.result(10)) for each in both)
    gets = [request for request in store.requests if request[0] == "GET"]
    assert len(gets) - fetcher().counts.hedged <= len(set(gets))


def test_the_files_of_a_cache_are_counted_once_for_all_arrays(store, options, tmp_path, monkeypatch):
    counted = []
    found = Cache._found
    monkeypatch.setattr(Cache, "_found", lambda self: counted.append(self) or found(self))
    sources = [feedline.open_source(zarr(store, tmp_path, f"{name}.zarr", 2), store=options) for name in "abcd"]
    for source in sources:
        source.read(np.arange(2), np.empty((2, 100), np.int64))
    assert len(counted) == 2  # for the limit, and after the first block that was stored


def test_no_request_is_larger_than_the_memory_that_is_promised_for_one(store, options):
    store.objects["/x.bin"] = os.urandom(10 << 20)
    source = feedline.open_source(f"{store.url}/x.bin", dtype=np.dtype((np.uint8, 1 << 10)), store=options)
    item = source._opened[0]
    assert item.samples([(5, 9 << 20), (7, 0)]) == [store.objects["/x.bin"][5 : 5 + (9 << 20)], b""]
    assert max(stop - start for start, stop in store.gets()) <= REQUEST_BYTES


def test_a_reader_of_a_whole_object_fetches_ahead_what_a_small_cache_holds(store, tmp_path):
    store.objects["/x.bin"] = bytes(100 << 20)
    options = feedline.Store(cache=tmp_path, cache_bytes=32 << 20)
    source = feedline.open_source(f"{store.url}/x.bin", dtype=np.dtype((np.uint8, 1 << 10)), store=options)
    item = source._opened[0]
    go_on = threading.Event()
    store.fault = lambda *request: go_on.wait(20) and None
    item.read_on_from(0)
    assert 0 < len(item._pending) <= 4  # a quarter of the cache, in blocks of 2 MiB
    go_on.set()
    source.close()


def test_listings_do_not_say_when_other_requests_are_late(bucket, options):
    bucket.objects["/corpus/a.bin"] = b"1"
    versions = len(fetcher()._durations.get(0, ()))
    assert len(listing(Url.parse("s3://corpus/a"), options)) == 1
    assert len(fetcher()._durations.get(0, ())) == versions


@pytest.mark.slow
def test_more_files_than_may_be_open_are_an_error_that_says_so_and_none_stays_open(store, tmp_path):
    for number in range(60):
        path = tmp_path / "x.array_record"
        writer = ArrayRecordWriter(str(path), "group_size:1")
        writer.write(bytes(100))
        writer.close()
        store.objects[f"/corpus/{number}.array_record"] = path.read_bytes()
    script = """
import os, resource, sys, time, feedline
def open_files():
    found = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    return [path for path in found if path.startswith(sys.argv[1])]
options = feedline.Store(cache=sys.argv[1], patience_s=20)
feedline.open_source('s3://corpus/1?.array_record', store=options).close()  # what stays open of the libraries
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, used + 200))
try:
    feedline.open_source('s3://corpus/*.array_record', store=options)
except feedline.FeedError as error:
    assert "ulimit -n" in str(error), error
else:
    sys.exit("no error")
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 200, used + 200))
none = 0  # times in a row: some had not begun when the error came
for _ in range(400):
    none = 0 if open_files() else none + 1
    if none == 20:
        break
    time.sleep(0.05)
assert none == 20, open_files()
source = feedline.open_source('s3://corpus/*.array_record', store=options)
assert len(source) == 60 and source[59] == bytes(100)
"""
    ended = programs.run(
        [sys.executable, "-c", script, str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=120, env={**os.environ, **store.variables()},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
