"""The bounded memory for arrays that were read."""

import threading

import numpy as np
import pytest

from feedline.sources.kept import Kept


def _reader(read, key, size=100):
    def run():
        read.append(key)
        return np.zeros(size, np.uint8)

    return run


def test_those_used_last_are_kept():
    kept, read = Kept(300), []
    for key in ("a", "b", "c", "a", "d", "a", "b"):  # d lets b go, which was not used for longest
        kept.get(key, _reader(read, key))
    assert read == ["a", "b", "c", "d", "b"]


def test_one_that_is_too_large_is_kept_alone():
    kept, read = Kept(300), []
    kept.get("small", _reader(read, "small"))
    for _ in range(3):
        kept.get("large", _reader(read, "large", 1000))
    kept.get("small", _reader(read, "small"))
    kept.get("large", _reader(read, "large", 1000))
    assert read == ["small", "large", "small", "large"]


def test_many_threads_read_one_array_once():
    kept, read, gate = Kept(300), [], threading.Event()

    def slow():
        read.append("a")
        assert gate.wait(timeout=60)
        return np.zeros(100, np.uint8)

    got = []
    threads = [threading.Thread(target=lambda: got.append(kept.get("a", slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    other = kept.get("b", lambda: np.ones(1, np.uint8))  # does not wait for it
    gate.set()
    for thread in threads:
        thread.join(timeout=60)
    assert read == ["a"]
    assert other[0] == 1
    assert all(array is got[0] for array in got)


def test_what_fails_is_read_again():
    kept = Kept(300)
    with pytest.raises(OSError, match="the disk is gone"):
        kept.get("a", lambda: (_ for _ in ()).throw(OSError("the disk is gone")))
    assert kept.get("a", lambda: np.zeros(1)).size == 1


def test_cleared_while_it_is_read_it_is_not_counted():
    kept, read = Kept(250), []

    def clearing():
        kept.clear()
        return np.zeros(100, np.uint8)

    assert len(kept.get("a", clearing)) == 100
    for key in ("b", "c", "b"):
        kept.get(key, _reader(read, key))
    assert read == ["b", "c"]
