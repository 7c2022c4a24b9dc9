"""Rows among shards, and their gather from memory, against NumPy's concatenation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline.loader.scattered import Scattered
from feedline.loader.shards import Shards

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


@given(LENGTHS, st.data())
def test_the_shard_of_a_row_is_found(lengths, data):
    shards = Shards(lengths)
    rows = np.array(data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=30)), np.int64)
    expected = np.repeat(np.arange(len(lengths)), lengths)
    np.testing.assert_array_equal(shards.of(rows), expected[rows])
    np.testing.assert_array_equal(shards.of(np.arange(sum(lengths))), expected)


def test_one_long_shard_among_many_tiny_ones():
    lengths = [1] * 500 + [100_000] + [1] * 500
    rows = np.arange(sum(lengths))
    np.testing.assert_array_equal(Shards(lengths).of(rows), np.repeat(np.arange(1001), lengths))


@given(LENGTHS, st.data())
def test_split_names_each_place_once_and_tells_the_row_in_its_shard(lengths, data):
    shards = Shards(lengths)
    rows = np.array(data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=30)), np.int64)
    got, seen = np.full(len(rows), -1), []
    for shard, local, places in shards.split(rows):
        seen.append(shard)
        assert (local >= 0).all()
        assert (local < lengths[shard]).all()
        assert (got[places] == -1).all()
        got[places] = sum(lengths[:shard]) + local
    assert seen == sorted(set(seen))
    np.testing.assert_array_equal(got, rows)


def test_adjacent_places_are_a_slice():
    (first, _, one), (second, _, other) = Shards([4, 4]).split(np.array([6, 5, 1, 0]))
    assert (first, one, second, other) == (0, slice(2, 4), 1, slice(0, 2))


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_not_there_is_refused(row):
    with pytest.raises(IndexError, match=f"rows are 0 to 4, got {row} to {row}"):
        Shards([2, 3]).of(np.array([row]))


def _parts(shape, dtype, distance, lengths, seed):
    """Arrays whose rows lie `distance` bytes apart in memory of their own, at any address."""
    random = np.random.default_rng(seed)
    row = np.empty((1, *shape), dtype)
    parts = []
    for length in lengths:
        memory = random.integers(0, 255, length * distance + row.nbytes + 64, np.uint8)
        start = int(random.integers(0, 64))
        strides = (distance, *row.strides[1:])
        parts.append(np.ndarray((length, *shape), dtype, memory, start, strides))
    return parts


@settings(max_examples=200)
@given(
    st.sampled_from([(), (1,), (3,), (7, 2), (128, 3)]),
    st.sampled_from([np.uint8, np.uint16, np.int64]),
    st.integers(0, 9),
    st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    st.data(),
)
def test_rows_of_any_size_distance_and_address_are_gathered(shape, dtype, more, lengths, data):
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    distance = data.draw(st.sampled_from([size, size + more, max(1, size // 2)]))
    parts = _parts(shape, dtype, distance, lengths, seed=more)
    places = data.draw(
        st.lists(st.sampled_from([(i, j) for i, length in enumerate(lengths) for j in range(length)]), max_size=25)
    )
    assert Scattered.fits(parts)
    columns = tuple(data.draw(st.sampled_from([slice(None), slice(n // 3, n), np.arange(n)[::2]])) for n in shape)
    expected = [parts[i][j] for i, j in places]
    for axis, column in enumerate(columns):
        expected = [row[(slice(None),) * axis + (column,)] for row in expected]
    cut = np.empty(shape, dtype)
    for axis, column in enumerate(columns):
        cut = cut[(slice(None),) * axis + (column,)]
    wide = np.zeros((len(places), *cut.shape, 2), dtype)
    for out in (np.zeros((len(places), *cut.shape), dtype), wide[..., 0]):
        part, rows = (np.array([place[k] for place in places], np.int64) for k in (0, 1))
        Scattered(parts).read(part, rows, columns, out)
        for got, row in zip(out, expected, strict=True):
            np.testing.assert_array_equal(got, row)
    assert not wide[..., 1].any()


@pytest.mark.parametrize("offset", [0, 1024, 3072, 128, 7])
def test_rows_are_copied_straight_or_in_pieces_alike(offset):
    """Parts that lie 0, 1, … × offset bytes off the grid of the first one's rows."""
    memory = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    parts = [np.ndarray((50, 3072), np.uint8, memory, i * (50 * 3072 + offset)) for i in range(3)]
    whole, rows = np.concatenate(parts), np.random.default_rng(3).integers(0, 150, 400)
    rows[:3] = 0, 49, 149
    for columns in (slice(None), slice(1024, 2048), slice(2047, 3072), np.arange(5)):
        out = np.empty((400, *whole[0, columns].shape), np.uint8)
        Scattered(parts).read(rows // 50, rows % 50, (columns,), out)
        np.testing.assert_array_equal(out, whole[rows][:, columns])


def test_what_does_not_lie_row_by_row_does_not_fit():
    x = np.arange(24).reshape(4, 6)
    assert not Scattered.fits([np.asfortranarray(x)])
    assert not Scattered.fits([x[::-1]])
    assert not Scattered.fits([x, x[::2]])
    assert not Scattered.fits([x[:, ::2]])
    assert Scattered.fits([x[:, 2:4], x[:0]])


def test_a_part_of_one_row_may_have_any_stride():
    x = np.arange(24).reshape(4, 6)
    parts = [x[::3][:1], x[1:], x[2:3]]
    assert Scattered.fits(parts)
    assert Scattered.fits(parts[:1])
    out = np.empty((3, 6), x.dtype)
    Scattered(parts).read(np.array([1, 0, 2]), np.array([2, 0, 0]), (slice(None),), out)
    np.testing.assert_array_equal(out, x[[3, 0, 2]])
