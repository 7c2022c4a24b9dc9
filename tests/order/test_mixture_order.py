"""The order of a mixture against loops over single rows, its bounds, and pinned rows that never change."""

import contextlib
import itertools
import pickle
from fractions import Fraction
from unittest import mock

import mixture_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline._src.options import Blocks, Order
from feedline._src.order.mixture import (
    LARGEST_BLOCK,
    MixtureOrder,
    Phase,
    _taken,
    arranged,
    counts_of,
    seed_of_source,
)

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)


def deviations(counts):
    """For each source, a list: how far it is from its share after 0, 1, 2, … places of a block."""
    block = arranged(counts)
    each = [
        [0, *itertools.accumulate((source == i) - Fraction(count, len(block)) for source in block)]
        for i, count in enumerate(counts)
    ]
    assert [row[-1] for row in each] == [0] * len(counts)  # a block holds exactly these counts
    return each


@given(COUNTS)
def test_the_places_are_those_of_tijdemans_rule(counts):
    assert arranged(counts) == oracle.places(counts)


@given(COUNTS | st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_beginnings_and_windows_keep_the_shares(counts):
    margin = Fraction(1, max(1, 2 * sum(map(bool, counts)) - 2))
    for each in deviations(counts):
        assert max(map(abs, each)) <= 1 - margin
        # a window from place a to b, also over the ends of blocks, deviates by each[b] - each[a]: by at most one
        # row if there are two sources
        assert max(each) - min(each) <= 2 - 2 * margin


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([1, 1], (1, 1)),
        ([2, 1, 0], (2, 1, 0)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([1 / 7, 6 / 7], (1, 6)),
        ([50, 30, 20], (5, 3, 2)),
        ([1e300, 1e300], (1, 1)),
        ([np.float32(0.7), np.float32(0.3)], (7, 3)),
        ([5], (1,)),
    ],
)
def test_a_block_is_the_smallest_with_exactly_these_shares(weights, counts):
    assert counts_of(dict(enumerate(weights))) == counts


def test_a_share_below_one_row_of_the_largest_block_is_refused():
    assert counts_of({"a": LARGEST_BLOCK - 1, "b": 1}) == (LARGEST_BLOCK - 1, 1)
    for a, share in ((99_999, "1e-05"), (10**15, "1e-15")):
        with pytest.raises(
            ValueError, match=rf"at least one row in 65,536, and the share of 'b' is {share}; raise its weight"
        ):
            counts_of({"a": a, "b": 1})


@st.composite
def mixtures(draw):
    """A mixture of up to four small sources, with up to three phases of weights."""
    size = draw(st.integers(1, 4))
    lengths = tuple(draw(st.lists(st.integers(1, 12), min_size=size, max_size=size)))
    starts = [0, *sorted(draw(st.sets(st.integers(1, 60), max_size=2)))]
    counts = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    phases = [(start, tuple(draw(counts.filter(any)))) for start in starts[:-1]]
    phases.append((starts[-1], tuple(draw(st.lists(st.integers(1, 5), min_size=size, max_size=size)))))
    shuffles = st.sampled_from([True, False, Blocks(2, 2)])
    orders = tuple(Order(seed, draw(shuffles)) for seed in range(size))
    end = draw(st.sampled_from(["endless", "first_exhausted", "all_exhausted"]))
    order = MixtureOrder(tuple("abcd"[:size]), lengths, orders, tuple(Phase(*phase) for phase in phases), end)
    return order, oracle.run(lengths, orders, phases, end, most=150)


def expected_of(order, run, epoch):
    """An epoch's row indices, the epochs of their sources, and how many rows of each source precede a position."""
    rows = [each[1:] for each in run if each[0] == epoch]
    taken = [np.zeros(len(order.names), int)]
    for source, _, _ in rows:
        taken.append(taken[-1] + np.eye(len(order.names), dtype=int)[source])
    indices = [order.firsts[source] + row for source, _, row in rows]
    return np.array(indices), np.array([own_epoch for _, own_epoch, _ in rows]), taken


@given(mixtures(), st.data())
@settings(max_examples=150)
def test_every_epoch_is_that_of_the_loops(mixture, data):
    order, run = mixture
    epochs = run[-1][0] + 1
    epoch = data.draw(st.integers(0, epochs - 1))
    rows, own_epochs, taken = expected_of(order, run, epoch)
    if epoch < epochs - 1:
        assert order.rows == len(rows)
    else:
        assert order.rows >= len(rows)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    some = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=40)), np.int64)
    for by_numpy in (False, True):
        with (
            mock.patch("feedline._src.order.mixture.library", return_value=None)
            if by_numpy
            else contextlib.nullcontext()
        ):
            np.testing.assert_array_equal(order.rows_at(epoch, range(start, stop)), rows[start:stop])
            np.testing.assert_array_equal(order.rows_at(epoch, some), rows[some])
    np.testing.assert_array_equal(order.own_positions(np.full_like(some, epoch), some)[0], own_epochs[some])
    assert order.taken(start) == tuple(taken[start])


def test_pinned_rows():
    """A run that resumes relies on these rows: they must never change."""
    assert [seed_of_source(seed, source) for seed in (0, 7) for source in (0, 1)] == [
        16794734956373370131, 9318869662365894696, 13715930546597229364, 10873181180868569773,
    ]  # fmt: skip
    orders = tuple(Order(seed_of_source(7, source)) for source in range(3))
    order = MixtureOrder(tuple("abc"), (100, 50, 6), orders, (Phase(0, (5, 3, 2)), Phase(20, (1, 1, 1))))
    assert order.rows_at(0, range(30)).tolist() == [
        54, 137, 50, 151, 83, 109, 14, 154, 135, 31, 37, 136, 90, 150, 98, 143, 76, 153, 115, 25,
        75, 126, 152, 89, 141, 155, 64, 142, 151, 3,
    ]  # fmt: skip


def test_the_end_of_an_epoch_of_many_sources_needs_no_search():
    names = tuple(map(str, range(300)))
    before = _taken.cache_info().misses
    order = MixtureOrder(names, (50,) * 300, (Order(),) * 300, (Phase(0, (2, 1) * 150),), "all_exhausted")
    assert order.rows <= 50 * 450
    assert _taken.cache_info().misses == before  # each miss counts the rows of all sources
    assert [min(order.taken(order.rows - k)) for k in range(2)] == [50, 49]


def test_positions_outside_of_an_epoch_are_refused():
    order = MixtureOrder(("a",), (6,), (Order(),), (Phase(0, (1,)),), "all_exhausted")
    for positions in (range(5, 7), range(-1, 2), np.array([5, 6]), np.array([-1, 2])):
        with pytest.raises(IndexError, match=r"positions must be in \[0, 6\), got"):
            order.rows_at(0, positions)
    assert order.rows_at(0, range(3, 3)).tolist() == []
    assert order.rows_at(0, np.array([], np.int64)).tolist() == []
    with pytest.raises(ValueError, match=r"epoch 4611686018427387904 is too late for that; seek"):
        order.rows_at(1 << 62, range(1))


@pytest.mark.parametrize("count", [1, 511, 512, 513, 40_000])
@pytest.mark.parametrize("counts", [(7, 2, 1), (21_001, 13_003, 3), (0, 1, 1)])
def test_c_and_numpy_compute_the_same_rows(count, counts):
    """The longest ranges span several chunks of C and tables of places, and sources begin again in them."""
    orders = (Order(1), Order(2, Blocks(100, 7)), Order(3, False))
    order = MixtureOrder(
        tuple("abc"), (100_000, 9_000, 4_000), orders, (Phase(0, counts), Phase(10**6, (1, 1, 1)))
    )
    for start in (0, 16_379, 999_999 - count, 10**6 - 5, 10**6 + 1):
        for positions in (range(start, start + count), np.arange(start, start + 3 * count, 3)):
            found = order.rows_at(0, positions)
            with mock.patch("feedline._src.order.mixture.library", return_value=None):
                np.testing.assert_array_equal(found, order.rows_at(0, positions))
        for same in (range(start, start + 3 * count, 3), positions.astype(np.int32), positions.astype(">i8")):
            np.testing.assert_array_equal(found, order.rows_at(0, same))
    again = pickle.loads(pickle.dumps(order))
    assert again == order
    np.testing.assert_array_equal(again.rows_at(0, positions), found)
