"""A part of a batch in one call: the rows at some positions of an epoch, of every leaf, as NumPy finds them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline import Blocks, Order
from feedline._src.native.gather import Segments
from feedline._src.native.library import library
from feedline._src.order.compiled import epoch_order
from feedline._src.order.epoch import rows_at
from feedline._src.sources.row_gather import fill

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


@compiled
@given(part=parts_of_a_batch(), data=st.data())
@settings(max_examples=200)
def test_each_leaf_has_the_rows_at_its_positions(part, data):
    lengths, leaves, order, epoch, positions = part
    random = np.random.default_rng(len(lengths))
    expected_rows = rows_at(order, sum(lengths), epoch, np.asarray(positions, np.int64))
    copies, outs, expected, segments = [], [], [], []
    for shape, dtype in leaves:
        parts = [random.integers(0, 100, (length, *shape)).astype(dtype) for length in lengths]
        columns = tuple(
            data.draw(st.sampled_from([slice(None), slice(0, 1), slice(size // 2, size)])) for size in shape
        )
        expected.append(np.concatenate(parts)[expected_rows][(slice(None), *columns)])
        outs.append(np.empty(expected[-1].shape, dtype))
        segments.append(Segments(parts))
        copies.append(segments[-1].copy(len(positions), columns, outs[-1]))
    found = fill(library(), epoch_order(order, sum(lengths), epoch), positions, copies)
    np.testing.assert_array_equal(found, expected_rows)
    for out, wanted in zip(outs, expected, strict=True):
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
