"""The gather in C against NumPy's indexing: any segments, distances between rows, dtypes and cuts of columns."""

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline._src.native.gather import Segments
from feedline._src.native.library import library

compiled = pytest.mark.skipif(library() is None, reason="the library was not built")
DTYPES = [np.bool_, np.uint8, np.int16, np.float32, np.float64, np.complex128, ">i8", ">f4"]


def filled(shape, dtype, random):
    return np.frombuffer(random.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)


@st.composite
def columns(draw, size):
    start, stop = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    listed = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    return draw(st.sampled_from([slice(None), slice(start, stop), np.array(listed)]))


@st.composite
def gathers(draw):
    """Segments, the columns and rows that are wanted, and where they go: with how much space between them."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 16, 17]), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
    parts = []
    for length in lengths:
        apart = draw(st.sampled_from([1, 1, 2, 5]))  # rows between two rows
        parts.append(filled((length * apart, *shape), dtype, random)[::apart])
    wanted = tuple(draw(columns(size)) for size in shape)
    rows = random.integers(0, sum(lengths), draw(st.integers(0, 40)))
    return parts, wanted, rows, draw(st.sampled_from([1, 2])), draw(st.booleans())


def by_numpy(parts, wanted, rows):
    found = np.concatenate(parts)[rows]
    for axis, column in enumerate(wanted, start=1):
        found = found[(slice(None),) * axis + (column,)]
    return found


@compiled
@given(gathers())
@settings(max_examples=200)
def test_c_and_numpy_gather_the_same(gather):
    parts, wanted, rows, apart, stream = gather
    expected = by_numpy(parts, wanted, rows)
    room = np.full((len(rows) * apart, *expected.shape[1:]), 7, expected.dtype)
    Segments(parts).gather(library(), rows, wanted, room[::apart], stream)
    assert room[::apart].tobytes() == expected.tobytes()
    if apart > 1:
        assert (room[1::apart] == np.array(7).astype(expected.dtype)).all(), "nothing between the rows is written"


@compiled
@pytest.mark.parametrize("wrong", [-1, 5, 2**62, -(2**63)])
@pytest.mark.parametrize("parts", [[5], [2, 3], [0, 5, 0]])
def test_a_row_out_of_range_is_an_error_and_nothing_is_written(parts, wrong):
    out = np.full((3, 4), 7)
    segments = Segments([np.zeros((length, 4), np.int64) for length in parts])
    with pytest.raises(IndexError, match=rf"^rows are 0 to 4, got {wrong}$"):
        segments.gather(library(), np.array([0, wrong, 1]), (slice(None),), out)
    assert (out == 7).all()


@compiled
@pytest.mark.parametrize("shape", [(2, 4), (4, 4), (3, 3), (3,), (3, 4, 1), (3, 5)])
def test_memory_of_another_shape_is_refused(shape):
    segments = Segments([np.zeros((5, 4), np.int32)])
    with pytest.raises(ValueError, match=r"^out must be writeable and have the shape \[3, 4\]$"):
        segments.gather(library(), np.arange(3), (slice(None),), np.zeros(shape, np.int32))


@compiled
def test_memory_that_may_not_be_written_is_refused():
    out = np.zeros((3, 4), np.int32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        Segments([np.ones((5, 4), np.int32)]).gather(library(), np.arange(3), (slice(None),), out)


@compiled
@pytest.mark.parametrize("shape", [(5,), (5, 3)])
@pytest.mark.parametrize("into", ["<i4", ">i4", "<f8", ">f8"])
def test_another_byte_order_is_converted(shape, into):
    values = np.arange(np.prod(shape), dtype=">i4").reshape(shape)
    out = np.empty((3, *shape[1:]), into)
    Segments([values]).gather(library(), np.array([4, 0, 2]), (slice(None),) * (len(shape) - 1), out)
    np.testing.assert_array_equal(out, values[[4, 0, 2]])


@compiled
@pytest.mark.parametrize(
    "out", [np.zeros((3, 4), np.float64), np.zeros((3, 4), np.int32, "F"), np.zeros((3, 8), np.int32)[:, ::2]]
)
def test_other_dtypes_and_strides_are_written_as_numpy_writes_them(out):
    values = np.arange(20, dtype=np.int32).reshape(5, 4)
    Segments([values]).gather(library(), np.array([4, 0, 2]), (slice(None),), out)
    np.testing.assert_array_equal(out, values[[4, 0, 2]])


def mapped_at(address, size):
    """Memory near an address, as far from all other allocations as is wanted."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(found), np.uint8)


@compiled
def test_segments_may_lie_terabytes_apart():
    parts = [mapped_at(address, 4096) for address in (1 << 40, 1 << 46, 3 << 44)]
    assert max(part.ctypes.data for part in parts) - min(part.ctypes.data for part in parts) > 1 << 45
    parts = [part.reshape(16, 256) for part in parts] + [np.zeros((3, 256), np.uint8)]
    for i, part in enumerate(parts):
        part[:] = np.arange(len(part))[:, None] + 40 * i
    rows = np.random.default_rng(0).permutation(51)
    out = np.empty((51, 256), np.uint8)
    Segments(parts).gather(library(), rows, (slice(None),), out)
    np.testing.assert_array_equal(out, np.concatenate(parts)[rows])


@compiled
@pytest.mark.parametrize("lengths", [[1] * 3000, [10**6, *[1] * 100], [*[1] * 100, 10**6], [7, 0, 0, 9, 0, 300]])
def test_every_row_is_found_in_its_segment(lengths):
    parts = [np.arange(length, dtype=np.int64) + 10**7 * i for i, length in enumerate(lengths)]
    rows = np.random.default_rng(0).integers(0, sum(lengths), 5000)
    out = np.empty(5000, np.int64)
    Segments(parts).gather(library(), rows, (), out)
    np.testing.assert_array_equal(out, np.concatenate(parts)[rows])
