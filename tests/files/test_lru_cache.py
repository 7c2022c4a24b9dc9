"""The LRU cache of arrays: eviction, values larger than its limit, threads that read the same value."""

import threading

import numpy as np
import pytest

from feedline._src.files.file import LruCache


def _reader(read, key, size=100):
    def run():
        read.append(key)
        return np.zeros(size, np.uint8)

    return run


def test_the_least_recently_used_value_is_evicted():
    cache, read = LruCache(300), []
    for key in ("a", "b", "c", "a", "d", "a", "b"):  # d evicts b
        cache.get(key, _reader(read, key))
    assert read == ["a", "b", "c", "d", "b"]


def test_a_value_larger_than_the_limit_is_cached_alone():
    cache, read = LruCache(300), []
    cache.get("small", _reader(read, "small"))
    for _ in range(3):
        cache.get("large", _reader(read, "large", 1000))
    cache.get("small", _reader(read, "small"))
    cache.get("large", _reader(read, "large", 1000))
    assert read == ["small", "large", "small", "large"]


def test_threads_that_need_one_value_read_it_once():
    cache, read, gate = LruCache(300), [], threading.Event()

    def slow():
        read.append("a")
        assert gate.wait(timeout=60)
        return np.zeros(100, np.uint8)

    got = []
    threads = [threading.Thread(target=lambda: got.append(cache.get("a", slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    other = cache.get("b", lambda: np.ones(1, np.uint8))  # does not wait for "a"
    gate.set()
    for thread in threads:
        thread.join(timeout=60)
    assert read == ["a"]
    assert other[0] == 1
    assert all(array is got[0] for array in got)


def test_a_failure_is_not_cached():
    cache = LruCache(300)
    with pytest.raises(OSError, match="the disk is gone"):
        cache.get("a", lambda: (_ for _ in ()).throw(OSError("the disk is gone")))
    assert cache.get("a", lambda: np.zeros(1)).size == 1


def test_a_value_is_not_counted_if_the_cache_was_cleared_while_it_was_read():
    cache, read = LruCache(250), []

    def clearing():
        cache.clear()
        return np.zeros(100, np.uint8)

    assert len(cache.get("a", clearing)) == 100
    for key in ("b", "c", "b"):
        cache.get(key, _reader(read, key))
    assert read == ["b", "c"]
