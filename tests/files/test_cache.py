"""The cache on local disk: damage, limits, several processes, kills."""

import contextlib
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import programs
import pytest

import feedline
from feedline._src.files.cache import Cache, name_of

NAME = name_of("s3://bucket/x", "tag", 0, 1000)


def test_names_tell_address_version_and_range_apart():
    names = {name_of(url, tag, *part) for url in "ab" for tag in "ab" for part in ((0, 1), (0, 2), (1, 2))}
    assert len(names) == 12


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
    assert cache.get(NAME, 1000) is None
    cache.put(NAME, data)
    assert cache.get(NAME, 1000) == data
    with open(cache.path(NAME), "rb+") as file:
        content = damage(file.read())
    with open(cache.path(NAME), "wb") as file:
        file.write(content)
    assert cache.get(NAME, 1000) is None
    cache.put(NAME, data)
    assert cache.get(NAME, 1000) == data


def test_a_cache_that_is_deleted_while_it_is_used_is_made_again(tmp_path):
    cache = Cache(str(tmp_path), 10_000)
    cache.put(NAME, bytes(1000))
    shutil.rmtree(tmp_path / "blocks")
    assert cache.get(NAME, 1000) is None
    assert not cache.has(NAME)
    assert cache.find_whole(NAME, 1000) is None
    assert cache.make_whole(NAME, 1000, io.BytesIO(bytes(1000))).is_there
    cache.put(NAME, bytes(1000))
    assert cache.get(NAME, 1000) == bytes(1000)


def test_a_folder_where_a_block_would_lie_is_no_block(tmp_path):
    """As of a file of another user, which root could read. This process then has a file without a name."""
    cache = Cache(str(tmp_path), 10_000)
    os.makedirs(cache.path(NAME))
    assert cache.get(NAME, 1000) is None
    file = cache.open(NAME, 1000)
    cache.write(file, 0, bytes(1000))
    assert file.has(0)
    assert os.listdir(os.path.dirname(cache.path(NAME))) == [NAME]


def test_the_least_recently_used_blocks_are_evicted(tmp_path):
    cache = Cache(str(tmp_path), 800_000)  # each takes 8 KB on the disk
    for i in range(90):
        cache.put(f"{i:040}", bytes(4097))
        os.utime(cache.path(f"{i:040}"), (i, i))
    assert cache.has(f"{3:040}")
    abandoned = tmp_path / "blocks" / "00" / "killed.tmp"
    abandoned.write_bytes(bytes(10))
    os.utime(abandoned, (1, 1))
    for i in range(90, 120):
        cache.put(f"{i:040}", bytes(4097))
    there = [i for i in range(120) if os.path.exists(cache.path(f"{i:040}"))]
    assert 80 <= len(there) <= 104
    assert 3 in there
    assert set(range(90, 120)) <= set(there)
    assert not abandoned.exists()


WRITER = """
import os, sys
from feedline._src.files.cache import Cache
cache, i = Cache(sys.argv[1], 1 << 20), int(sys.argv[2])
print("ready", flush=True)
while True:
    i += 1
    cache.put(f"{i % 40:040}", bytes([i % 40]) * 50_000)
"""


@pytest.mark.slow
def test_processes_share_a_cache_and_may_be_killed(tmp_path):
    """Whatever is there is whole, and the limit holds, while three processes write and two are killed."""
    with contextlib.ExitStack() as stack:
        commands = [[sys.executable, "-c", WRITER, str(tmp_path), str(i)] for i in (0, 7, 20)]
        writers = [stack.enter_context(programs.started(each, stdout=subprocess.PIPE)) for each in commands]
        assert [writer.stdout.readline() for writer in writers] == [b"ready\n"] * 3
        cache, seen, until = Cache(str(tmp_path), 1 << 20), 0, time.monotonic() + 1
        while time.monotonic() < until or not seen:
            for i in range(40):
                found = cache.get(f"{i:040}", 50_000)
                assert found in (None, bytes([i]) * 50_000)
                seen += found is not None
        for writer in writers[:2]:
            writer.send_signal(signal.SIGKILL)
    for i in range(40):
        assert cache.get(f"{i:040}", 50_000) in (None, bytes([i]) * 50_000)
    assert sum(
        p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.suffix != ".tmp" and p.is_file()
    ) < 1.3 * (1 << 20)


def test_threads_that_store_the_same_block(tmp_path):
    cache, data = Cache(str(tmp_path), 1 << 20), os.urandom(1000)
    threads = [threading.Thread(target=cache.put, args=(NAME, data)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.get(NAME, 1000) == data
    assert len(list((tmp_path / "blocks" / NAME[:2]).iterdir())) == 1


def test_a_whole_file_is_evicted_once_it_is_not_in_use(tmp_path):
    cache = Cache(str(tmp_path), 400_000)  # each of the others takes 8 KB
    whole, path = cache.make_whole(NAME, 50_000, io.BytesIO(bytes(50_000))), cache.path(NAME) + ".whole"

    def fill(first):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (1, os.stat(path).st_mtime))  # used long ago
        for i in range(first, first + 60):
            cache.put(f"{i:040}", bytes(4097))

    fill(0)
    assert cache.evictions
    assert whole.is_there
    assert cache.find_whole(NAME, 50_000) is not None
    del whole
    fill(60)
    assert not os.path.exists(path)


def test_a_whole_file_whose_bytes_differ_is_not_found(tmp_path):
    cache = Cache(str(tmp_path), 1 << 20)
    whole, path = cache.make_whole(NAME, 5, io.BytesIO(b"12345")), cache.path(NAME) + ".whole"
    times = os.stat(path)
    with open(path, "r+b") as file:
        file.write(b"2")
    assert not whole.is_intact
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # damage of a disk does not change the time
    assert cache.find_whole(NAME, 5) is None


def test_a_full_disk_evicts_half_and_is_an_error_if_that_is_not_enough(tmp_path, monkeypatch):
    cache, write, full = Cache(str(tmp_path), 1 << 30), os.pwrite, [1]
    for i in range(4):
        cache.put(f"{i:040}", bytes(100_000))

    def filling(descriptor, data, at):
        if len(data) > 10_000 and full and (full.pop() or True):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", filling)
    cache.put(NAME, bytes(100_000))
    assert cache.get(NAME, 100_000) == bytes(100_000)
    assert 1 <= cache.evictions <= 3
    full += [1] * 10
    with pytest.raises(feedline.FeedError, match=r"cannot be written \(No space left.*set FEEDLINE_CACHE"):
        cache.put(f"{9:040}", bytes(100_000))
    assert cache.get(f"{9:040}", 100_000) is None


def test_the_default_limit_is_half_of_the_space(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert 0.3 * free < Cache(str(tmp_path), None).limit_bytes < 0.7 * free
