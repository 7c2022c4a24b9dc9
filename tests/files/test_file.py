"""Files on local disk: bytes of one version, read in parts or mapped; and the LRU cache."""

import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from background import PATIENCE_S, spawn

import feedline
from feedline._src.files.file import LruCache, OpenFile, digests_of
from feedline._src.files.files import Files
from feedline._src.native.library import library

DATA = bytes(np.random.default_rng(0).integers(0, 256, 100_000, np.uint8))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture(params=["here", "pickled"])
def file(path, request):
    files = Files([str(path)])
    return (files if request.param == "here" else pickle.loads(pickle.dumps(files)))[0]


def test_parts_come_in_any_order_and_end_with_the_file(file):
    offsets, lengths = np.array([99_990, 5, 0, 200_000, 7]), np.array([20, 3, 0, 4, 60_000])
    assert file.read(offsets, lengths) == [
        DATA[at : at + length] for at, length in zip(offsets, lengths, strict=True)
    ]


def test_rows_are_written_to_their_places(file):
    out = np.zeros((3, 8), np.uint8)
    file.read_rows(np.array([16, 0, 16]), out)
    assert [bytes(row) for row in out] == [DATA[16:24], DATA[:8], DATA[16:24]]
    with pytest.raises(feedline.FeedError, match="ends 6 bytes too early"):
        file.read_rows(np.array([99_998]), out[:1])


@pytest.mark.skipif(library() is None, reason="the C library reads the rows")
def test_rows_of_an_open_file_are_read_in_c(path):
    file, out = OpenFile(str(path)), np.zeros((5, 100), np.uint8)
    offsets, places = np.array([len(DATA) - 100, 0, 100, 200, 100]), np.array([4, 1, 2, 0, 3])
    assert file.read_rows(offsets, places, out)
    assert out[places].tobytes() == b"".join(DATA[at : at + 100] for at in offsets.tolist())
    assert not file.read_rows(np.array([0, len(DATA) - 99]), np.array([0, 1]), out), "a byte is missing"
    assert not file.read_rows(np.array([-1]), np.array([0]), out)


def test_memory_open_file_and_samples_have_the_same_bytes(file, path):
    assert bytes(file.memory()) == DATA == file.with_path(lambda local: Path(local).read_bytes())
    with file.open() as opened:
        assert opened.read() == DATA
    assert file.samples([(10, 5), (99_999, 5)]) == [DATA[10:15], DATA[99_999:]]
    copy = path.with_name("copy.bin")
    copy.write_bytes(DATA)
    assert digests_of(Files([str(copy)])) == digests_of([file])


@pytest.mark.parametrize("use", ["read", "open", "check", "pickle", "memory"])
def test_a_replaced_file_is_refused(path, use):
    files = Files([str(path)])
    path.with_name("new").write_bytes(DATA[::-1])
    path.with_name("new").rename(path)
    uses = {
        "read": lambda file: file.read(np.array([0]), np.array([4])),
        "open": lambda file: file.open(),
        "check": lambda file: file.check(),
        "pickle": lambda file: pickle.loads(pickle.dumps(files)),
        "memory": lambda file: file.memory(),
    }
    with pytest.raises(feedline.FeedError, match="it was replaced by another file"):
        uses[use](files[0])


def test_a_file_is_checked_where_it_was_opened(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Files([path.name])[0]
    monkeypatch.chdir("/")
    file.check()
    path.write_bytes(DATA[:50])
    for check in (file.check, file.check_open):
        with pytest.raises(feedline.FeedError, match="its size changed from 100000 to 50 bytes"):
            check()


@pytest.mark.parametrize("pattern", ["x.jsonl", "*.jsonl", "*.jpg"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, pattern):
    os.mkfifo(tmp_path / pattern.replace("*", "x"))
    with pytest.raises(ValueError, match=r"read from regular files, .* is a pipe, a socket or a device; write"):
        feedline.open_source(tmp_path / pattern)


def _reader(read, key, size=100):
    def run():
        read.append(key)
        return np.zeros(size, np.uint8)

    return run


@pytest.mark.parametrize(
    ("keys", "expected"),
    [("abcadab", "abcdb"), ("aLLLaL", "aLaL")],
    ids=["the least recently used is evicted", "a value above the limit is kept alone"],
)
def test_values_are_read_again_once_they_are_evicted(keys, expected):
    cache, read = LruCache(300), []
    for key in keys:
        cache.get(key, _reader(read, key, 1000 if key == "L" else 100))
    assert "".join(read) == expected


def test_threads_that_need_one_value_read_it_once():
    cache, read, gate = LruCache(300), [], threading.Event()

    def slow():
        read.append("a")
        assert gate.wait(timeout=60)
        return np.zeros(100, np.uint8)

    waiting = [spawn(lambda: cache.get("a", slow)) for _ in range(4)]
    other = cache.get("b", lambda: np.ones(1, np.uint8))  # does not wait for "a"
    gate.set()
    got = [future.result(PATIENCE_S) for future in waiting]
    assert read == ["a"]
    assert other[0] == 1
    assert all(array is got[0] for array in got)


def test_after_a_fork_no_thread_waits_for_a_lock_of_the_parent(monkeypatch):
    class Slow(LruCache):
        """A cache that another thread uses as soon as `_process` is set."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_process" and values:
                values.append(spawn(lambda: self.get("b", lambda: np.ones(1))).result(PATIENCE_S))

    values = []
    cache = Slow(300)
    values.append(cache.get("a", lambda: np.zeros(1)))
    with cache._lock:  # a thread of the parent holds it
        monkeypatch.setattr(os, "getpid", lambda: -1)
        values.append(cache.get("a", lambda: np.zeros(1)))
    assert [value[0] for value in values] == [0, 1, 0]
