"""The order: a bijection that never changes, and that no statistic tells from chance.

Every statistic is also applied to weaker constructions, and has to reject them.
"""

import numpy as np
import order_statistics as statistics
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from order_statistics import feedlines, weak_key, weak_rounds

from feedline import Blocks, Order
from feedline._src.order import epoch as epochs
from feedline._src.order.epoch import keys_at, rows_at
from feedline._src.order.permutation import FEW, LARGEST, feistel, grid, words

word = st.integers(0, 2**64 - 1)
edges = [*range(FEW - 1, FEW + 3), 2**15, 2**17 - 1, 2**17, 2**17 + 1]
near_square = st.builds(lambda side, off: side**2 + off, st.integers(2, 440), st.integers(-1, 1))
enumerable = st.sampled_from(edges) | near_square | st.integers(1, 10_000) | st.integers(10_000, 200_000)
size = st.integers(1, 12) | st.integers(1, 700)
size_of_blocks = st.integers(1, 2**62) | st.integers(1, 10**6)
huge = st.sampled_from([10**12, 2**61 + 1, LARGEST - 1, LARGEST]) | st.integers(FEW + 1, LARGEST)


def is_bijection(rows, n):
    return rows.dtype == np.int64 and rows.shape == (n,) and np.array_equal(np.sort(rows), np.arange(n))


def test_bijection_for_every_small_n():
    for n in range(600):
        assert is_bijection(rows_at(Order(n), n, 0, np.arange(n)), n)
        assert n == 0 or is_bijection(feistel(n, words("order", n, 0), np.arange(n, dtype=np.uint64)), n)


@given(n=enumerable, seed=word, epoch=word)
@settings(max_examples=150, deadline=None)
def test_bijection(n, seed, epoch):
    assert is_bijection(rows_at(Order(seed), n, epoch, np.arange(n)), n)


@given(
    n=huge,
    shuffle=st.just(True) | st.builds(Blocks, size_of_blocks, size_of_blocks),
    seed=word,
    epoch=word,
    start=st.integers(0, LARGEST),
    stride=st.integers(1, 2**40),
)
@settings(max_examples=200, deadline=None)
def test_huge_orders_stay_in_range_and_repeat_nothing(n, shuffle, seed, epoch, start, stride):
    positions = np.unique([0, n - 1, *((start + i * stride) % n for i in range(2000))])
    rows = rows_at(Order(seed, shuffle), n, epoch, positions)
    assert 0 <= rows.min() <= rows.max() < n
    assert np.unique(rows).size == positions.size


@given(n=st.integers(1, 60) | huge, seed=word, epoch=word, spots=st.lists(st.integers(0, LARGEST), max_size=9))
@settings(max_examples=300, deadline=None)
@example(n=4097, seed=5, epoch=6, spots=range(4097))  # some positions need cycle walking
def test_the_documented_row_whatever_other_positions_are_computed(n, seed, epoch, spots):
    positions = np.array([spot % n for spot in spots], np.int64)
    expected = [statistics.documented_row(n, seed, epoch, position) for position in positions.tolist()]
    assert rows_at(Order(seed), n, epoch, positions).tolist() == expected


@given(n=size, rows=size, window=size, seed=word, epoch=word)
@settings(max_examples=40, deadline=None)
@example(n=5000, rows=1, window=3, seed=5, epoch=6)
@example(n=10_001, rows=2, window=2500, seed=5, epoch=6)
@example(n=14_000, rows=3000, window=2, seed=5, epoch=6)
def test_the_documented_blocked_order(n, rows, window, seed, epoch):
    found = rows_at(Order(seed, Blocks(rows, window)), n, epoch, np.arange(n))
    assert is_bijection(found, n)
    assert found.tolist() == statistics.documented_blocked_order(rows, window, n, seed, epoch)


@given(seed=word, epoch=word, positions=st.lists(st.integers(0, 2**63 - 1), max_size=9))
@settings(max_examples=100, deadline=None)
def test_the_documented_key_whatever_other_positions_are_computed(seed, epoch, positions):
    expected = [statistics.documented_hash("keys", seed, epoch, position) for position in positions]
    assert keys_at(seed, epoch, np.array(positions, np.int64)).tolist() == expected


def test_orders_and_keys_never_change():
    first = np.arange(4)
    assert rows_at(Order(0), 4096, 0, first).tolist() == [1340, 3337, 4001, 1104]
    assert rows_at(Order(0), 4097, 0, first).tolist() == [1177, 2783, 3668, 1803]
    assert rows_at(Order(1), 10**6, 2, first).tolist() == [647195, 208646, 44623, 296288]
    last = rows_at(Order(2**64 - 1), 2**62, 2**64 - 1, first[:3])
    assert last.tolist() == [3847008717229062489, 4528793012659664659, 340548865381143644]
    assert rows_at(Order(1, Blocks(100, 5)), 1050, 2, first).tolist() == [311, 305, 1026, 392]
    large = rows_at(Order(1, Blocks(341, 64)), 10**9, 2, first)
    assert large.tolist() == [963499214, 585769190, 366083034, 69059449]
    assert keys_at(0, 0, first[:2]).tolist() == [8256955481978368055, 14950522920746716579]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n", [0, 3, 5000, LARGEST])
def test_positions_outside_the_epoch_are_refused(n, shuffle):
    with pytest.raises(ValueError, match=r"at most 2\^62, got 4611686018427387905; split"):
        rows_at(Order(), LARGEST + 1, 0, np.arange(3))
    for low, high in [(-1, -1), (n, n), (-2, n + 7)]:
        with pytest.raises(IndexError, match=rf"in \[0, {n}\), got {low} to {high}; counted over all epochs"):
            rows_at(Order(0, shuffle), n, 0, np.array([low, high]))
    with pytest.raises(IndexError, match="got -1 to -1"):
        keys_at(0, 0, np.array([-1]))


def test_labels_in_a_batch_of_sorted_data():
    """1,000 labels of 1,000 rows each: a batch of 1,024 has 641 different labels if all rows are shuffled."""
    n, positions = 10**6, np.arange(500_000, 501_024)

    def labels(shuffle):
        return np.mean([np.unique(rows_at(Order(s, shuffle), n, 0, positions) // 1000).size for s in range(20)])

    assert 630 < labels(True) < 652
    few, many = labels(Blocks(rows=250, window=16)), labels(Blocks(rows=250, window=1024))
    assert few < 17
    assert 350 < many < 652


# Against pure chance: a p-value below one in a million rejects it.

LIMIT = 1e-6
KEYS = [(seed, epoch) for seed in range(4) for epoch in range(4)]
SIZES = [1000, FEW + 1, 10**6, 10**12, 2**61 + 1, LARGEST]


@pytest.mark.parametrize("n", SIZES)
def test_adjacent_positions(n):
    b = 1 << grid(n)[1]
    for step in (1, 2, b, b + 1, n // 2):
        assert statistics.neighbours(feedlines(n), n, b, step, KEYS) > LIMIT
        assert statistics.neighbours(weak_rounds(n), n, b, step, KEYS) < LIMIT


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("pair", statistics.PAIRS)
def test_orders_of_two_keys(pair, n):
    b, pairs = 1 << grid(n)[1], [statistics.PAIRS[pair](seed) for seed in range(8)]
    assert statistics.distance(feedlines(n), n, b, pairs) > LIMIT
    assert statistics.distance(weak_rounds(n), n, b, pairs) < LIMIT
    assert (statistics.distance(weak_key(n), n, b, pairs) < LIMIT) == (pair in ("equal sums", "exchanged"))


def test_keys_are_distinct_and_their_bits_fair():
    positions = np.arange(2**16)
    keys, other = keys_at(3, 1, positions), keys_at(4, 0, positions)
    weak = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert np.unique(keys).size == positions.size
    for fair in (keys, keys[1:] ^ keys[:-1], keys ^ other):
        assert statistics.fair_bits(fair) > LIMIT
    assert statistics.fair_bits(weak[1:] ^ weak[:-1]) < LIMIT


def test_keys_have_nothing_to_do_with_the_order(monkeypatch):
    here, seeds = np.arange(1000), range(400)

    def in_place(seed):
        return int((rows_at(Order(seed), 1000, 0, here) == np.argsort(keys_at(seed, 0, here))).sum())

    assert statistics.matches([in_place(seed) for seed in seeds]) > LIMIT
    monkeypatch.setattr(epochs, "words", lambda purpose, seed, epoch: words("order", seed, epoch))
    assert statistics.matches([in_place(seed) for seed in seeds]) < LIMIT
