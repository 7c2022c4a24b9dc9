"""Arrays, `.npy` and `.npz` files, alone and in shards, against NumPy indexing."""

import gc
import os
import pickle
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limited
from rows_read import read_rows

import feedline
from feedline import open_source
from feedline._src.options import Order
from feedline._src.order.epoch import SingleOrder, rows_at
from feedline._src.sources.arrays import ArraySource


def _rows(count, columns=3, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).integers(0, 100, (count, columns)).astype(dtype)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any), st.data())
def test_shards_follow_each_other_and_rows_come_in_any_order_with_repeats(lengths, data):
    shards = [{"x": _rows(n, seed=i), "y": np.arange(n) + 100 * i} for i, n in enumerate(lengths)]
    source = ArraySource(shards)
    whole = {name: np.concatenate([shard[name] for shard in shards]) for name in ("x", "y")}
    rows = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=20))
    out = read_rows(source, np.array(rows, np.int64))
    assert len(source) == sum(lengths)
    for name in whole:
        np.testing.assert_array_equal(out[name], whole[name][rows])


def test_a_pickled_source_holds_paths_and_not_the_rows(tmp_path):
    x = _rows(10_000)
    np.save(tmp_path / "x.npy", x)
    source = ArraySource([{"x": tmp_path / "x.npy"}])
    pickled = pickle.dumps(source)
    assert len(pickled) < 1000
    assert source.picklable
    assert not ArraySource([{"x": x}]).picklable
    np.testing.assert_array_equal(read_rows(pickle.loads(pickled), [3, 9_999])["x"], x[[3, 9_999]])


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ({"x": np.float32(1)}, TypeError, "a leaf must be an array or the path"),
        ({"x": np.array(1.0)}, ValueError, "needs a first axis that counts rows"),
        ({"x": np.array(["a", "b"])}, TypeError, "holds numbers and booleans, got dtype <U1"),
        ({"x": np.array([[1], [1, 2]], object)}, TypeError, "dtype object; .* pad them"),
    ],
)
def test_trees_that_cannot_be_rows_are_refused(source, error, match):
    with pytest.raises(error, match=match):
        ArraySource([source])


def test_too_many_open_files_is_an_error(tmp_path):
    for i in range(40):
        np.save(tmp_path / f"{i}.npy", np.zeros(2))
    gc.collect()  # files that earlier tests left open must not be closed meanwhile
    os.close(lowest := os.open(tmp_path, os.O_RDONLY))  # the limit is on descriptor numbers, not on their count
    with (
        limited(resource.RLIMIT_NOFILE, lowest + 20),
        pytest.raises(feedline.FeedError, match=r"no more can be opened .*\(ulimit -n\)"),
    ):
        open_source(tmp_path / "*.npy")


@pytest.mark.parametrize("positions", [range(3, 17), np.array([16, 3, 3, 0])], ids=["range", "array"])
@pytest.mark.parametrize("dtype", [np.int32, np.float64], ids=["as it is", "cast"])
@pytest.mark.parametrize("shards", [[20], [7, 0, 13]], ids=str)
def test_rows_at_positions_of_an_epoch(positions, dtype, shards):
    """One call finds the rows and copies them. NumPy copies a leaf that is cast on the way."""
    ends = np.cumsum(shards)
    x, y = np.arange(60, dtype=np.int32).reshape(20, 3), np.arange(20) * 0.5
    cuts = zip(np.split(x, ends[:-1]), np.split(y, ends[:-1]), strict=True)
    source = ArraySource([{"x": part_of_x, "y": part_of_y} for part_of_x, part_of_y in cuts])
    out = [np.empty((len(positions), 2), dtype), np.empty(len(positions))]
    order = Order(seed=4)
    rows = source.read_ordered(
        SingleOrder(order, 20), 2, positions, [(0, (slice(1, 3),), out[0]), (1, (), out[1])]
    )
    expected = rows_at(order, 20, 2, np.asarray(positions))
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(out[0], x[expected, 1:3])
    np.testing.assert_array_equal(out[1], y[expected])
