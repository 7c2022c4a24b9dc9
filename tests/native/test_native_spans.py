"""Spans in C against NumPy: the same values, marks and permutations, bit for bit."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline._src.native.gather import RowGather
from feedline._src.native.library import library
from feedline._src.native.spans import Spans, mark
from feedline._src.sources.arrays import NumpyRows
from feedline._src.sources.packing import permuted_each

pytestmark = pytest.mark.skipif(library() is None, reason="the library was not built")


@st.composite
def batches(draw):
    """(segments of values, spans of these values, a length of rows into which the spans fit)."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.int32, np.float64]))
    shape, apart = draw(st.sampled_from([(), (3,), (2, 2)])), draw(st.sampled_from([1, 2]))
    parts = [random.integers(0, 2**16, (length * apart, *shape)).astype(dtype)[::apart] for length in lengths]
    row = np.sort(random.integers(0, 6, draw(st.integers(0, 30))))
    part = random.integers(0, len(parts), len(row))
    first = random.integers(0, np.array(lengths)[part])
    length = random.integers(1, np.array(lengths)[part] - first + 1)
    begins = np.cumsum([0, *lengths])[part]
    used = int(np.bincount(row, length, minlength=1).max(initial=1))
    return parts, Spans(row, begins + first, length), used + draw(st.integers(0, 9))


def by_numpy(function, *arguments):
    """Call a function as if the C library were missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(function.__module__), "library", lambda: None)
        return function(*arguments)


@given(batches())
@settings(max_examples=200)
def test_c_and_numpy_copy_the_same_spans(batch):
    parts, spans, length = batch
    rows, shape = int(spans.row.max(initial=-1)) + 1, parts[0].shape[1:]
    into = np.int32 if parts[0].dtype == np.uint16 and not shape else parts[0].dtype
    by_c, numpy, expected = (np.full((rows, length, *shape), 7, into) for _ in range(3))
    expected[:] = 0
    used, values = [0] * rows, np.concatenate(parts)
    for row, first, count in zip(*map(np.ndarray.tolist, spans), strict=True):
        expected[row, used[row] : used[row] + count] = values[first : first + count]
        used[row] += count
    RowGather(parts).read_spans(spans, by_c)
    NumpyRows(parts).read_spans(spans, numpy)
    named = np.unique(spans.row)  # C writes no row that has no span
    assert by_c[named].tobytes() == expected[named].tobytes()
    assert numpy.tobytes() == expected.tobytes()


@given(batches())
def test_c_and_numpy_mark_the_same_spans(batch):
    _, spans, length = batch
    rows = int(spans.row.max(initial=-1)) + 1
    by_c, expected = (np.full((2, rows, length), 7, np.int32) for _ in range(2))
    mark(spans, *by_c)
    by_numpy(mark, spans, *expected)
    named = np.unique(spans.row)
    assert by_c[:, named].tobytes() == expected[:, named].tobytes()


@given(st.lists(st.integers(1, 10**6), max_size=50), st.integers(0, 999))
def test_c_and_numpy_permute_alike(sizes, seed):
    random = np.random.default_rng(seed)
    keys = list(random.integers(0, 2**64, 8, np.uint64))
    tweaks = random.integers(0, 2**32, len(sizes), np.uint32)
    arguments = (np.array(sizes, np.int64), keys, random.integers(0, sizes, dtype=np.int64), tweaks)
    np.testing.assert_array_equal(permuted_each(*arguments), by_numpy(permuted_each, *arguments))
