"""The blocked order: a bijection, equal to one laid out block by block, and random in blocks and in windows."""

import numpy as np
import order_statistics as statistics
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline import Blocks, Order
from feedline._src.order.epoch import rows_at
from feedline._src.order.permutation import LARGEST

word = st.integers(0, 2**64 - 1)
few = st.integers(1, 12)
size = few | st.integers(1, 700)


def whole(order, n, epoch=0):
    return rows_at(order, n, epoch, np.arange(n))


@given(n=size, rows=size, window=few | st.integers(1, 400), seed=word, epoch=word)
@settings(max_examples=40, deadline=None)
def test_the_documented_order(n, rows, window, seed, epoch):
    found = whole(Order(seed, Blocks(rows, window)), n, epoch)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(n))
    assert found.tolist() == statistics.documented_blocked_order(rows, window, n, seed, epoch)


def test_the_documented_order_of_many_blocks_and_of_large_windows():
    for rows, window, n in ((1, 3, 5000), (2, 2500, 10_001), (3000, 2, 14_000)):
        expected = statistics.documented_blocked_order(rows, window, n, 5, 6)
        assert whole(Order(5, Blocks(rows, window)), n, 6).tolist() == expected


@given(
    n=st.sampled_from([LARGEST, LARGEST - 1]) | st.integers(2**40, LARGEST),
    rows=st.integers(1, 2**62) | st.integers(1, 10**6),
    window=st.integers(1, 2**62) | st.integers(1, 10**6),
    start=st.integers(0, LARGEST),
    stride=st.integers(1, 2**40),
)
@settings(max_examples=150, deadline=None)
def test_huge_orders_stay_in_range_and_repeat_nothing(n, rows, window, start, stride):
    positions = np.unique([0, n - 1, *((start + i * stride) % n for i in range(2000))])
    found = rows_at(Order(1, Blocks(rows, window)), n, 0, positions)
    assert 0 <= found.min() <= found.max() < n
    assert np.unique(found).size == positions.size


def test_blocked_orders_never_change():
    found = [rows_at(Order(1, Blocks(100, 5)), 1050, 2, np.arange(4)).tolist()]
    found += [rows_at(Order(1, Blocks(341, 64)), 10**9, 2, np.arange(4)).tolist()]
    assert found == [[311, 305, 1026, 392], [963499214, 585769190, 366083034, 69059449]]


def test_labels_in_a_batch_of_sorted_data():
    """1,000 labels of 1,000 rows each: a batch of 1,024 has 641 different ones if all rows are shuffled."""
    n, positions = 10**6, np.arange(500_000, 501_024)

    def labels(shuffle):
        return np.mean([np.unique(rows_at(Order(s, shuffle), n, 0, positions) // 1000).size for s in range(20)])

    assert 630 < labels(True) < 652
    few, many = labels(Blocks(rows=250, window=16)), labels(Blocks(rows=250, window=1024))
    assert few < 17
    assert 350 < many < 652
