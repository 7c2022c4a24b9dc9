"""The gather without the C library against NumPy's concatenation: any strides, cuts of columns, and dtypes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline._src.sources.row_gather import NumpyRows


def _parts(shape, dtype, distance, lengths, seed):
    """Arrays whose rows lie `distance` bytes apart in memory of their own, at any address."""
    random = np.random.default_rng(seed)
    row = np.empty((1, *shape), dtype)
    for length in lengths:
        memory = random.integers(0, 255, length * distance + row.nbytes + 64, np.uint8)
        yield np.ndarray(
            (length, *shape), dtype, memory, int(random.integers(0, 64)), (distance, *row.strides[1:])
        )


@settings(max_examples=150)
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
    parts = list(_parts(shape, dtype, distance, lengths, seed=more))
    rows = np.array(data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=25)), np.int64)
    columns = tuple(data.draw(st.sampled_from([slice(None), slice(n // 3, n), np.arange(n)[::2]])) for n in shape)
    expected = np.concatenate(parts)[rows]
    for axis, column in enumerate(columns, start=1):
        expected = expected[(slice(None),) * axis + (column,)]
    wide = np.zeros((*expected.shape, 2), dtype)
    for out in (np.zeros(expected.shape, dtype), wide[..., 0], np.zeros(expected.shape, np.float64)):
        NumpyRows(parts).read(rows, columns, out)
        np.testing.assert_array_equal(out, expected.astype(out.dtype))
    assert not wide[..., 1].any()


@pytest.mark.parametrize("lengths", [[5], [2, 3], [0, 5, 0]])
@pytest.mark.parametrize("row", [-1, 5, 2**40, -(2**63)])
def test_a_row_out_of_range_is_refused_and_nothing_is_written(lengths, row):
    out = np.full((3, 10), 7, np.uint8)
    gather = NumpyRows([np.zeros((length, 10), np.uint8) for length in lengths])
    with pytest.raises(IndexError, match=f"rows are 0 to 4, got {min(row, 0)} to {max(row, 1)}"):
        gather.read(np.array([0, row, 1]), (slice(None),), out)
    assert (out == 7).all()
