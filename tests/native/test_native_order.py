"""The order in C against the order in NumPy: the same rows, bit for bit."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline import Blocks, Order
from feedline._src.native.gather import rows_at_positions
from feedline._src.native.library import library
from feedline._src.order.blocks import blocked
from feedline._src.order.compiled import epoch_order
from feedline._src.order.epoch import rows_at
from feedline._src.order.permutation import LARGEST, permuted, words

compiled = pytest.mark.skipif(library() is None, reason="the library was not built")
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


def by_numpy(order, n, epoch, positions):
    words_ = positions.astype(np.uint64)
    if not order.shuffle:
        return positions
    if isinstance(order.shuffle, Blocks):
        return blocked(order.shuffle, n, order.seed, epoch, words_)
    return permuted(n, words("order", order.seed, epoch), words_)


@compiled
@given(n=counts, shuffle=shuffles, seed=word, epoch=word, data=st.data())
@settings(max_examples=400)
def test_c_and_numpy_give_the_same_rows(n, shuffle, seed, epoch, data):
    ends = np.unique(np.clip([0, 1, n // 2, n - 2, n - 1], 0, n - 1))
    drawn = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, n, data.draw(st.integers(0, 1300)))
    positions = np.concatenate([ends, drawn])
    order = Order(seed, shuffle)
    found = rows_at_positions(epoch_order(order, n, epoch), positions)
    np.testing.assert_array_equal(found, by_numpy(order, n, epoch, positions))


@compiled
@pytest.mark.parametrize("shuffle", [True, Blocks(100, 7)])
@pytest.mark.parametrize("cut", [slice(None, None, 2), slice(None, None, -1), slice(3, None, 7)])
def test_positions_may_have_any_strides(shuffle, cut):
    positions = np.arange(20_000)[cut]
    found = rows_at(Order(5, shuffle), 20_000, 1, positions)
    np.testing.assert_array_equal(found, by_numpy(Order(5, shuffle), 20_000, 1, positions))


@compiled
@given(n=counts, shuffle=shuffles, first=word, count=st.integers(0, 1300))
def test_a_range_gives_the_rows_of_its_positions(n, shuffle, first, count):
    first %= n
    count = min(count, n - first)
    order = epoch_order(Order(3, shuffle), n, 1)
    rows, bad = np.empty(count, np.int64), ctypes.c_int64()
    assert (
        library().feedline_order(ctypes.byref(order), None, first, count, rows.ctypes.data, ctypes.byref(bad)) == 0
    )
    np.testing.assert_array_equal(rows, by_numpy(Order(3, shuffle), n, 1, first + np.arange(count)))


@compiled
@pytest.mark.parametrize("shuffle", [False, True, Blocks(3, 2)])
@pytest.mark.parametrize("wrong", [-1, 10, 2**62, -(2**63)])
def test_a_position_out_of_range_is_an_error_and_nothing_is_written(shuffle, wrong):
    order = epoch_order(Order(0, shuffle), 10, 0)
    positions, rows, bad = np.array([0, 9, wrong, 3]), np.full(4, 77), ctypes.c_int64()
    code = library().feedline_order(
        ctypes.byref(order), positions.ctypes.data, 0, 4, rows.ctypes.data, ctypes.byref(bad)
    )
    assert (code, bad.value) == (2, wrong)
    assert rows.tolist() == [77] * 4


@compiled
@pytest.mark.parametrize(
    ("first", "count", "wrong"), [(0, 11, 10), (10, 1, 10), (-1, 2, -1), (2**63 - 1, 5, 2**63 - 1)]
)
def test_a_range_that_ends_beyond_the_epoch_is_an_error(first, count, wrong):
    order, rows, bad = epoch_order(Order(), 10, 0), np.full(11, 77), ctypes.c_int64()
    code = library().feedline_order(ctypes.byref(order), None, first, count, rows.ctypes.data, ctypes.byref(bad))
    assert (code, bad.value) == (2, wrong)
    assert rows.tolist() == [77] * 11
