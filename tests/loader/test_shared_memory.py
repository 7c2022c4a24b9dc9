"""Batches in shared memory: they arrive unchanged, and the names of the shared memory are always removed."""

import os
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from feedline import WorkerError
from feedline._src.loader import shared_memory
from feedline._src.loader.shared_memory import SharedLeaves

LEAVES = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.zeros((0, 5), np.int64),
    np.arange(5000).astype(ml_dtypes.bfloat16),
    np.array([True, False]),
    np.array(7, np.int16),
    np.broadcast_to(np.True_, 5),
    np.arange(12).reshape(3, 4)[:, ::2],
]


def names():
    return list(Path("/dev/shm").glob(f"feedline-{os.getpid()}-*"))


def test_leaves_arrive_as_they_were_and_lie_on_page_borders():
    leaves = pickle.loads(pickle.dumps(SharedLeaves(LEAVES)))
    assert not names()  # though the memory is still mapped
    for leaf, expected in zip(leaves, LEAVES, strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)
        leaf[...] = 1  # writable
        assert leaf.ctypes.data % 4096 == 0


def test_leaves_of_no_bytes_arrive_too():
    assert pickle.loads(pickle.dumps(SharedLeaves([LEAVES[1]])))[0].shape == (0, 5)
    assert pickle.loads(pickle.dumps(SharedLeaves([]))) == []


def test_shared_memory_that_is_dropped_before_it_was_sent_is_removed():
    shared = SharedLeaves(LEAVES)
    assert len(names()) == 1
    del shared
    assert not names()


def test_shared_memory_that_was_sent_is_removed_by_the_receiver():
    shared = SharedLeaves(LEAVES)
    sent = pickle.dumps(shared)
    del shared
    assert len(names()) == 1
    pickle.loads(sent)
    assert not names()


def test_shared_memory_that_could_not_be_written_is_removed(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "open", full, raising=False)
    with pytest.raises(WorkerError, match=r"in /dev/shm, which must have room .* and a batch takes 32,768 bytes"):
        SharedLeaves(LEAVES)
    assert not names()
