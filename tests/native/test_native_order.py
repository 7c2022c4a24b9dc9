"""The order in C against the order in NumPy: the same rows, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline import Blocks, Order
from feedline._src.native.gather import rows_at_positions
from feedline._src.native.library import library
from feedline._src.order.epoch import epoch_order
from feedline._src.order.permutation import LARGEST

pytestmark = pytest.mark.skipif(library() is None, reason="the library was not built")
word = st.integers(0, 2**64 - 1)
near_powers = st.builds(
    lambda bits, more: min(max(1, (1 << bits) + more), LARGEST), st.integers(0, 62), st.integers(-2, 2)
)
counts = near_powers | st.integers(1, 10_000) | st.integers(1, LARGEST)
shuffles = (
    st.booleans()
    | st.builds(Blocks, rows=st.integers(1, 100), window=st.integers(1, 20))
    | st.builds(Blocks, rows=st.integers(1, LARGEST), window=st.integers(1, LARGEST))
)


@given(n=counts, shuffle=shuffles, seed=word, epoch=word, data=st.data())
@settings(max_examples=400)
def test_c_and_numpy_give_the_same_rows(n, shuffle, seed, epoch, data):
    ends = np.unique(np.clip([0, 1, n // 2, n - 2, n - 1], 0, n - 1))
    drawn = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, n, data.draw(st.integers(0, 1300)))
    positions = np.concatenate([ends, drawn])
    order, first = Order(seed, shuffle), int(drawn[0]) if len(drawn) else 0
    adjacent = range(first, min(first + 1300, n))
    for some in (positions, positions[::-2], adjacent):
        struct = epoch_order(order, n, epoch)
        expected = struct.rows_by_numpy(np.asarray(some).astype(np.uint64))
        np.testing.assert_array_equal(rows_at_positions(struct, some), expected)


@pytest.mark.parametrize("shuffle", [False, True, Blocks(3, 2)])
@pytest.mark.parametrize(
    ("positions", "wrong"),
    [
        *((np.array([0, 9, wrong, 3]), wrong) for wrong in (-1, 10, 2**62, -(2**63))),
        (range(11), 10), (range(10, 11), 10), (range(-1, 1), -1), (range(2**63 - 1, 2**63 + 4), 2**63 - 1),
    ],
)  # fmt: skip
def test_a_position_out_of_range_is_an_error(shuffle, positions, wrong):
    with pytest.raises(IndexError, match=rf"must be in \[0, 10\), got {wrong} \(code 2\)"):
        rows_at_positions(epoch_order(Order(0, shuffle), 10, 0), positions)
