"""Spans in C against NumPy: the same values, marks and permutations, bit for bit."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline._src.native.gather import Segments
from feedline._src.native.library import library
from feedline._src.native.spans import Spans, copy_parts, mark
from feedline._src.sources.packing import permuted_each

compiled = pytest.mark.skipif(library() is None, reason="the library was not built")


@st.composite
def batches(draw):
    """Segments of values, spans within them, and the length of the rows that the spans fit."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.int32, np.float64]))
    parts = [random.integers(0, 2**16, length).astype(dtype) for length in lengths]
    row = np.sort(random.integers(0, 6, draw(st.integers(0, 30))))
    part = random.integers(0, len(parts), len(row))
    first = random.integers(0, np.array(lengths)[part])
    length = random.integers(1, np.array(lengths)[part] - first + 1)
    begins = np.cumsum([0, *lengths])[part]
    used = int(np.bincount(row, length, minlength=1).max(initial=1))
    return parts, Spans(row, begins + first, length), used + draw(st.integers(0, 9))


def by_numpy(function, *arguments):
    """Call a function while there is no library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(function.__module__), "library", lambda: None)
        return function(*arguments)


@compiled
@given(batches())
@settings(max_examples=200)
def test_c_and_numpy_copy_the_same_spans(batch):
    parts, spans, length = batch
    rows = int(spans.row.max(initial=-1)) + 1
    into = np.int32 if parts[0].dtype == np.uint16 else parts[0].dtype
    values = np.concatenate(parts)
    expected, out = (np.full((rows, length), 7, into) for _ in range(2))
    copy_parts(spans, [values[f : f + n] for f, n in zip(spans.first, spans.length, strict=True)], expected)
    Segments(parts).copy_spans(library(), spans, out)
    named = np.unique(spans.row)  # C writes no row that has no span
    assert out[named].tobytes() == expected[named].tobytes()


@compiled
@given(batches())
def test_c_and_numpy_mark_the_same_spans(batch):
    _, spans, length = batch
    rows = int(spans.row.max(initial=-1)) + 1
    by_c, expected = (np.full((2, rows, length), 7, np.int32) for _ in range(2))
    mark(spans, *by_c)
    by_numpy(mark, spans, *expected)
    named = np.unique(spans.row)
    assert by_c[:, named].tobytes() == expected[:, named].tobytes()


@compiled
@given(st.lists(st.integers(1, 10**6), max_size=50), st.integers(0, 999))
def test_c_and_numpy_permute_alike(sizes, seed):
    random = np.random.default_rng(seed)
    keys = list(random.integers(0, 2**64, 8, np.uint64))
    tweaks = random.integers(0, 2**32, len(sizes), np.uint32)
    arguments = (np.array(sizes, np.int64), keys, random.integers(0, sizes, dtype=np.int64), tweaks)
    np.testing.assert_array_equal(permuted_each(*arguments), by_numpy(permuted_each, *arguments))
