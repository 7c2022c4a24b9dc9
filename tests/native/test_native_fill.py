"""A part of a batch in one call: the rows at some positions of an epoch, of every leaf, as NumPy finds them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline import Blocks, Order
from feedline.native.gather import Segments
from feedline.native.library import library
from feedline.order.compiled import epoch_order
from feedline.order.epoch import rows_at
from feedline.sources.arrays import ArraySource
from feedline.sources.fill import fill

compiled = pytest.mark.skipif(library() is None, reason="the library was not built")


@st.composite
def parts_of_a_batch(draw):
    """Lengths of the shards, leaves as (row shape, dtype), the order, the epoch, and positions: a range or any."""
    lengths = draw(st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any))
    leaves = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(1, 9), max_size=2).map(tuple),
                st.sampled_from([np.uint8, np.int32, np.float64, ">i2"]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    order = Order(draw(st.integers(0, 9)), draw(st.sampled_from([False, True, Blocks(7, 3)])))
    n = sum(lengths)
    first, last = sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    some = st.lists(st.integers(0, n - 1), max_size=40).map(lambda drawn: np.array(drawn, np.int64))
    return lengths, leaves, order, draw(st.integers(0, 5)), draw(st.just(range(first, last)) | some)


@given(part=parts_of_a_batch(), data=st.data())
@settings(max_examples=200)
def test_each_leaf_has_the_rows_at_its_positions(part, data):
    lengths, leaves, order, epoch, positions = part
    random = np.random.default_rng(len(lengths))
    shards = [
        {
            f"x{i}": random.integers(0, 100, (length, *shape)).astype(dtype)
            for i, (shape, dtype) in enumerate(leaves)
        }
        for length in lengths
    ]
    source = ArraySource(shards)
    expected_rows = rows_at(order, len(source), epoch, np.asarray(positions, np.int64))
    cuts, expected = [], []
    for i, (shape, dtype) in enumerate(leaves):
        columns = tuple(
            data.draw(st.sampled_from([slice(None), slice(0, 1), slice(size // 2, size)])) for size in shape
        )
        whole = np.concatenate([shard[f"x{i}"] for shard in shards])[expected_rows]
        expected.append(whole[(slice(None), *columns)])
        written_as = data.draw(st.sampled_from([np.dtype(dtype), np.dtype(np.float64)]))  # C leaves casts to NumPy
        cuts.append((i, columns, np.empty(expected[-1].shape, written_as)))
    np.testing.assert_array_equal(source.read_in_order(order, epoch, positions, cuts), expected_rows)
    for (_, _, out), wanted in zip(cuts, expected, strict=True):
        np.testing.assert_array_equal(out, wanted)


@compiled
def test_a_position_or_a_row_out_of_range_is_an_error():
    out = np.zeros((3, 4), np.int32)
    short = Segments([np.ones((5, 4), np.int32)])
    copy = short.copy(3, (slice(None),), out)
    with pytest.raises(IndexError, match=r"must be in \[0, 10\), got 10 \(code 2\)"):
        fill(library(), epoch_order(Order(shuffle=False), 10, 0), range(8, 11), [copy])
    with pytest.raises(IndexError, match=r"must be in \[0, 10\), got 5 \(code 1\)"):
        fill(library(), epoch_order(Order(shuffle=False), 10, 0), range(5, 8), [copy])
    assert (out == 0).all()
