"""The cache on local disk: damage, limits, full disks, several users at once, and folders deleted while in use."""

import concurrent.futures
import contextlib
import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
from background import PATIENCE_S, arrived, spawn
from stored import RECORDS, array_record

import feedline
from feedline._src.files.cache import Cache
from feedline._src.files.cached_range import CachedRange, CacheFile
from feedline._src.files.client import RemoteObject
from feedline._src.files.file import Version
from feedline._src.files.files import Files
from feedline._src.files.store import Url


def cached(cache, key, size):
    return CachedRange(cache, RemoteObject(Url("s3://bucket", str(key)), Version(size, "tag"), 1.0), 0, size)


def put(cache, key, data):
    stored = cached(cache, key, len(data))
    stored.write([0], data)
    return stored


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:500],
        lambda data: b"y" + data[1:],
        lambda data: data[:-17] + bytes([data[-17] ^ 1]) + data[-16:],  # the checksum
        lambda data: data[:-16] + b"another." + data[-8:],
        lambda data: bytes(len(data)),
    ],
)
def test_a_damaged_block_is_fetched_again(tmp_path, damage):
    cache, data = Cache(str(tmp_path), 1 << 20), os.urandom(1000)
    block = cached(cache, "x", 1000)
    assert block.read_all() is None
    for _ in range(2):
        block.write([0], data)
        assert block.read_all() == data
        path = Path(block.path)
        path.write_bytes(damage(path.read_bytes()))
        assert cached(cache, "x", 1000).read_all() is None


def test_the_least_recently_used_files_are_evicted(tmp_path):
    cache = Cache(str(tmp_path), 800_000)  # each file takes 8 KB on the disk
    blocks = [put(cache, i, bytes(4097)) for i in range(90)]
    for i, block in enumerate(blocks):
        os.utime(block.path, (i, i))
    assert blocks[3].read_all()
    blocks += [put(cache, i, bytes(4097)) for i in range(90, 120)]
    there = {i for i, block in enumerate(blocks) if os.path.exists(block.path)}
    assert 80 <= len(there) <= 104
    assert there >= {3, *range(90, 120)}


def test_a_failed_fetch_of_a_whole_file_holds_up_nobody_while_its_error_is_kept(store, options, monkeypatch):
    store.objects["/x.bin"], waits, flock = b"bytes", threading.Event(), fcntl.flock
    files = [Files([f"{store.url}/x.bin"], options)[0] for _ in range(3)]
    waiting = []

    def noted(descriptor, operation):
        if threading.current_thread() is waiter and operation & fcntl.LOCK_NB:
            waits.set()
        flock(descriptor, operation)

    def fails_once(method, *request):
        if method == "GET" and not waiting:
            waiting.append(spawn(whole))
            arrived(waits)
            return 404
        return None

    def whole():
        nonlocal waiter
        waiter = threading.current_thread()
        return files[1].with_path(lambda local: Path(local).read_bytes())

    waiter = None
    monkeypatch.setattr(fcntl, "flock", noted)
    store.fault = fails_once
    with pytest.raises(feedline.FeedError, match="it no longer exists") as kept:
        files[0].with_path(str)
    assert waiting[0].result(PATIENCE_S) == files[2].with_path(lambda local: Path(local).read_bytes()) == b"bytes"
    assert kept.tb is not None  # the error and its frames live on, as in a notebook


def test_a_file_that_another_thread_is_creating_is_neither_deleted_nor_begun_again(tmp_path, monkeypatch):
    """Either would lose blocks that were fetched, or damage a whole file."""
    cache, data, asked = Cache(str(tmp_path), 1 << 20), os.urandom(5000), []
    first, second = (CachedRange(cache, Given("x", Version(5000, "tag"), data, asked), 0, 5000) for _ in "ab")
    usual, creating, go_on = CacheFile.begin, threading.Event(), threading.Event()

    def begin(file):
        if not creating.is_set():
            creating.set()
            arrived(go_on)
        usual(file)

    monkeypatch.setattr(CacheFile, "begin", begin)
    opening = spawn(second.open)
    arrived(creating)
    whole = first.whole()
    go_on.set()
    opening.result(PATIENCE_S)
    assert Path(second.whole().path).read_bytes() == Path(whole.path).read_bytes() == data
    assert asked == [(0, 5000)]


def test_a_cache_on_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    assert put(Cache(str(tmp_path), 1 << 20), "x", bytes(1000)).read_all() == bytes(1000)


def test_an_error_does_not_wait_for_a_process_that_fetches_another_file(store, options):
    store.objects |= {"/a": b"bytes", "/b": b"bytes"}
    files = Files([f"{store.url}/b", f"{store.url}/a"], options)
    held = files[1]._bytes.open()
    fcntl.flock(held.descriptor, fcntl.LOCK_EX)
    del store.objects["/b"]
    with pytest.raises(feedline.FeedError, match="it no longer exists"):
        spawn(files.fetch_whole).result(PATIENCE_S)
    fcntl.flock(held.descriptor, fcntl.LOCK_UN)
    assert files[1].with_path(lambda local: Path(local).read_bytes()) == b"bytes"


def test_a_full_disk_evicts_half_and_is_an_error_if_that_is_not_enough(tmp_path, monkeypatch):
    cache, write, create, full = Cache(str(tmp_path), 1 << 30), os.pwrite, os.open, [1]
    blocks = [put(cache, i, bytes(100_000)) for i in range(4)]

    def filling(descriptor, data, at):
        if len(data) > 10_000 and full and (full.pop() or True):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", filling)
    assert put(cache, "x", bytes(100_000)).read_all() == bytes(100_000)
    assert 1 <= sum(os.path.exists(block.path) for block in blocks) <= 3

    def refusing(path, flags, *mode):
        if flags & os.O_CREAT and full and full.pop():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(path, flags, *mode)

    full.append(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        assert put(cache, "y", bytes(100_000)).read_all() == bytes(100_000)
    assert not full
    full += [1] * 10
    with pytest.raises(feedline.FeedError, match=r"cannot be written \(No space left.*set FEEDLINE_CACHE"):
        put(cache, 9, bytes(100_000))
    assert cached(cache, 9, 100_000).read_all() is None


# --- deleted and damaged while in use ---


@contextlib.contextmanager
def deleted_all_the_time(folder):
    done = threading.Event()

    def delete():
        while not done.wait(0.001):
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def rows_of(source):
    return [source[row] for row in range(0, len(source), len(source) // 20)]


DAMAGE = {
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, 3 << 12),
    "overwritten": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_whole_file_of_the_cache_that_is_damaged_in_use_is_fetched_again(store, options, tmp_path, damage):
    store.objects["/x.array_record"] = array_record(tmp_path / "written")
    source = feedline.open_source(f"{store.url}/x.array_record", store=options)
    for _ in range(3):
        assert rows_of(source) == RECORDS[::10]
        (path,) = options.cache.rglob("*.whole")
        DAMAGE[damage](path)


class Given(NamedTuple):
    """An object that is fetched without a store."""

    url: str
    version: Version
    data: bytes
    asked: list

    async def fetch(self, start, stop):
        self.asked.append((start, stop))
        return self.data[start:stop]


def test_threads_that_use_a_cache_do_not_mind_that_it_is_deleted(tmp_path):
    """Another program may delete the folder before each system call of these threads."""
    folder = str(tmp_path / "cache")
    cache = Cache(folder, 100_000)

    def use(_):
        for i in range(200):
            data = bytes([i % 40]) * 5000
            block = put(cache, i % 40, data)
            assert block.read_all() in (None, data)
            try:
                whole = CachedRange(cache, Given(f"{i % 40}", Version(5000, "tag"), data, []), 0, 5000).whole()
                assert os.pread(whole.descriptor, 5000, 0) == data
            except feedline.FeedError as error:  # the folder was deleted during each of its attempts
                assert "must stay as they are" in str(error)  # noqa: PT017
            Cache(folder, None)

    with deleted_all_the_time(folder), concurrent.futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(use, range(3)))
