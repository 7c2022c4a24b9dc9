"""Threads and worker processes give the same batches, and leave no thread, process or file behind."""

import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from feedline import Feed, Order, Reading
from feedline._src.order.epoch import keys_at, rows_at


def _noisy(batch, rows):
    """A transform that draws from the rows' keys, and adds the id of the process that ran it."""
    shape = (len(rows.key), 1)
    return {
        "x": batch["x"] + (rows.key % np.uint64(1000)).astype(np.float32)[:, None],
        "pid": np.full(shape, os.getpid(), np.int32),
        "index": rows.index.astype(np.int32),
        "platform_is_cpu": np.full(shape, _platform() == "cpu"),
    }


def _platform():
    import jax

    return jax.default_backend()


@pytest.fixture
def path(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(600, dtype=np.float32).reshape(200, 3))
    return tmp_path / "x.npy"


@pytest.mark.parametrize(
    "reading", [Reading(threads=0), Reading(threads=1), Reading(threads=7, buffer=2), Reading(threads=2, buffer=5)]
)
def test_batches_do_not_depend_on_threads_or_buffers(sharding, delivered, path, reading):
    batches = delivered(Feed({"x": path}, 24, sharding, epochs=2, reading=reading, transform=_noisy))
    x = np.load(path)
    for k, batch in enumerate(batches):
        epoch, step = divmod(k, 200 // 24)
        positions = np.arange(step * 24, step * 24 + 24)
        index = rows_at(Order(), 200, epoch, positions)
        keys = keys_at(0, epoch, positions)
        np.testing.assert_array_equal(batch["index"], index)
        np.testing.assert_array_equal(batch["x"], x[index] + (keys % np.uint64(1000)).astype(np.float32)[:, None])
    assert len(batches) == 16


@pytest.mark.slow
def test_workers_give_the_same_batches_and_leave_nothing(sharding, delivered, path):
    with Feed({"x": path}, 24, sharding, epochs=1, transform=_noisy) as feed:
        expected = delivered(feed)
    with Feed({"x": path}, 24, sharding, epochs=1, transform=_noisy, reading=Reading(workers=2)) as feed:
        batches = delivered(feed)
        assert feed.statistics().workers == 2
    pids = {int(batch["pid"][0, 0]) for batch in batches}
    assert len(pids) == 2
    assert os.getpid() not in pids
    for one, other in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(one["x"], other["x"])
        np.testing.assert_array_equal(one["index"], other["index"])
        assert one["platform_is_cpu"].all()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not multiprocessing.active_children()


def _explode(batch, rows):
    if (rows.index == 0).any() and len(rows.index) > 1:
        raise ZeroDivisionError("row zero")
    return batch


@pytest.mark.parametrize("reading", [Reading(threads=2), pytest.param(Reading(workers=1), marks=pytest.mark.slow)])
def test_the_error_of_a_transform_arrives_unchanged_after_the_batches_before_it(sharding, path, reading):
    at = int(np.flatnonzero(rows_at(Order(), 200, 0, np.arange(200)) == 0)[0]) // 8
    with Feed({"x": path}, 8, sharding, epochs=1, transform=_explode, reading=reading) as feed:
        for _ in range(at):
            next(feed)
        with pytest.raises(ZeroDivisionError, match="row zero"):
            next(feed)
        assert feed.get_state()["step"] == at


@pytest.mark.parametrize(
    ("transform", "error", "match"),
    [
        (lambda b, r: {"x": b["x"][:1]}, ValueError, r"must map row i to row i.*batch\['x'\] came back as"),
        (
            lambda b, r: {"x": b["x"] if len(b["x"]) == 1 else 1.0},
            ValueError,
            r"came back as float64\[\], not float",
        ),
        (
            lambda b, r: {"x": b["x"].sum()},
            ValueError,
            r"must return NumPy arrays with one row for each row it got",
        ),
        (lambda b, r: {"x": list(b["x"])}, ValueError, r"must return NumPy arrays"),
        (lambda b, r: {"x": b["x"].astype(str)}, TypeError, r"holds numbers and booleans"),
        (
            lambda b, r: {"x": b["x"].astype(f"f{4 + 4 * (len(b['x']) > 1)}")},
            ValueError,
            r"float64\[8, 3\], not float32",
        ),
        (lambda b, r: b if len(r.key) == 1 else b["x"], ValueError, r"must return one tree"),
    ],
)
def test_a_transform_that_does_not_keep_rows_is_refused(sharding, path, transform, error, match):
    with pytest.raises(error, match=match), Feed({"x": path}, 8, sharding, transform=transform) as feed:
        next(feed)


def test_a_transform_that_cannot_be_pickled_for_workers_is_an_error(sharding, path):
    told = "^worker processes get a copy .* cannot be pickled: cannot pickle '_thread.lock'"
    lock = threading.Lock()
    options = {"transform": lambda batch, rows: lock and batch, "reading": Reading(workers=1)}
    with Feed({"x": path}, 8, sharding, **options) as feed, pytest.raises(TypeError, match=told):
        next(feed)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_transform_that_raises_stop_iteration_does_not_end_the_feed(sharding, path, threads):
    def transform(batch, rows):
        return next(iter([])) if len(rows.key) > 1 else batch

    with Feed({"x": path}, 8, sharding, transform=transform, reading=Reading(threads=threads)) as feed:
        with pytest.raises(RuntimeError, match="a transform must not raise StopIteration") as caught:
            next(feed)
        assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("dtype", [">i8", ">f4", ">u2", ">f8"])
def test_big_endian_rows_arrive_right(sharding, delivered, dtype):
    values = np.arange(64).astype(dtype)
    batches = delivered(Feed({"x": values}, 8, sharding, order=Order(shuffle=False), epochs=1))
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), np.arange(64))
