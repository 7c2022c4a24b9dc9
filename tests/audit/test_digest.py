"""Digests of rows: those of parts add up to that of the row, and every change of a row changes its digest."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline._src.tools.audit.digest import row_digests

DTYPES = [np.uint8, np.bool_, np.int16, ml_dtypes.bfloat16, np.float32, np.int64, np.float64, np.complex128]
SHAPE = (4, 6)
EVERYTHING = tuple((0, size) for size in SHAPE)


def rows_of(dtype, count=5):
    random = np.random.default_rng(0)
    return random.integers(2 if dtype is np.bool_ else 100, size=(count, *SHAPE)).astype(dtype)


def digests(rows, leaf=0):
    return row_digests(rows, leaf, SHAPE, EVERYTHING)


@pytest.mark.parametrize("dtype", DTYPES)
@given(down=st.integers(0, 4), across=st.integers(0, 6))
def test_digests_of_any_four_parts_add_up(dtype, down, across):
    rows = rows_of(dtype)
    parts = [
        row_digests(rows[:, a:b, c:d], 0, SHAPE, ((a, b), (c, d)))
        for a, b in ((0, down), (down, 4))
        for c, d in ((0, across), (across, 6))
    ]
    np.testing.assert_array_equal(np.sum(parts, axis=0, dtype=np.uint64), digests(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_of_a_row_changes_its_digest(dtype):
    rows = rows_of(dtype, count=1)
    flat = rows.reshape(-1)
    changed = [np.roll(rows, 1), np.zeros_like(rows)]
    for i, bit in [(0, 0), (7, 0), (23, rows.dtype.itemsize * 8 - 1)]:
        one = flat.copy()
        one.view(np.uint8).reshape(24, -1)[i, bit // 8] ^= 1 << bit % 8
        changed.append(one.reshape(rows.shape))
    others = np.flatnonzero(flat != flat[0])
    for i in others[:3]:  # two values of a row exchanged
        swapped = flat.copy()
        swapped[[0, i]] = swapped[[i, 0]]
        changed.append(swapped.reshape(rows.shape))
    found = [int(digests(row)[0]) for row in [rows, *changed]]
    assert len(set(found)) == len(found)
    assert int(digests(rows, leaf=1)[0]) not in found  # the same values in another leaf


def test_two_flipped_signs_change_the_digest():
    rows = rows_of(np.float64, count=1) + 1
    flipped = rows * np.where(np.arange(24).reshape(SHAPE) < 2, -1, 1)
    assert digests(rows) != digests(flipped)


def test_rows_without_values():
    assert row_digests(np.zeros((3, 0), np.float32), 0, (0,), ((0, 0),)).tolist() == [0, 0, 0]
