"""The gather in NumPy against NumPy's concatenation: any segments, distances between rows, and cuts of columns."""

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline._src.sources.numpy_gather import NumpyGather


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
    columns = tuple(data.draw(st.sampled_from([slice(None), slice(n // 3, n), np.arange(n)[::2]])) for n in shape)
    expected = [parts[i][j] for i, j in places]
    firsts = np.cumsum([0, *lengths])
    rows = np.array([firsts[i] + j for i, j in places], np.int64)
    for axis, column in enumerate(columns):
        expected = [row[(slice(None),) * axis + (column,)] for row in expected]
    cut = np.empty(shape, dtype)
    for axis, column in enumerate(columns):
        cut = cut[(slice(None),) * axis + (column,)]
    wide = np.zeros((len(places), *cut.shape, 2), dtype)
    for out in (np.zeros((len(places), *cut.shape), dtype), wide[..., 0]):
        gather = NumpyGather(parts)
        assert gather._segments
        gather.read(rows, columns, out)
        for got, row in zip(out, expected, strict=True):
            np.testing.assert_array_equal(got, row)
    assert not wide[..., 1].any()


@pytest.mark.parametrize("offset", [0, 1024, 3072, 128, 7])
def test_rows_copied_directly_and_in_chunks_are_the_same(offset):
    """Parts that lie 0, 1, … × offset bytes off the grid of the first one's rows."""
    memory = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    parts = [np.ndarray((50, 3072), np.uint8, memory, i * (50 * 3072 + offset)) for i in range(3)]
    whole, rows = np.concatenate(parts), np.random.default_rng(3).integers(0, 150, 400)
    rows[:3] = 0, 49, 149
    for columns in (slice(None), slice(1024, 2048), slice(2047, 3072), np.arange(5)):
        out = np.empty((400, *whole[0, columns].shape), np.uint8)
        NumpyGather(parts).read(rows, (columns,), out)
        np.testing.assert_array_equal(out, whole[rows][:, columns])


def test_rows_that_are_not_contiguous_or_evenly_spaced_are_indexed_array_by_array():
    x = np.arange(24).reshape(4, 6)
    for parts in ([np.asfortranarray(x)], [x[::-1]], [x, x[::2]], [x[:, ::2]]):
        gather, whole = NumpyGather(parts), np.concatenate(parts)
        assert not gather._segments
        for columns in (slice(1, 3), np.array([0, 2])):
            out = np.empty((4, 2), x.dtype)
            gather.read(np.array([3, 0, 0, len(whole) - 1]), (columns,), out)
            np.testing.assert_array_equal(out, whole[[3, 0, 0, -1]][:, columns])
    assert NumpyGather([x[:, 2:4], x[:0]])._segments


def test_a_part_of_one_row_may_have_any_stride():
    x = np.arange(24).reshape(4, 6)
    parts = [x[::3][:1], x[1:], x[2:3]]
    assert NumpyGather(parts)._segments
    assert NumpyGather(parts[:1])._segments
    out = np.empty((3, 6), x.dtype)
    NumpyGather(parts).read(np.array([3, 0, 4]), (slice(None),), out)
    np.testing.assert_array_equal(out, x[[3, 0, 2]])


_FAR = 1 << 44  # bytes: where Linux never puts a mapping by itself, some 100 TiB below those that it does
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_SHARED = np.random.default_rng(2).integers(0, 255, 1 << 20, np.uint8)


@pytest.fixture(scope="module")
def far():
    """uint8[4 MiB] that lies terabytes away from all other arrays."""
    size, fixed_noreplace = 1 << 22, 0x100000
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    address = _LIBC.mmap(_FAR, size, protection, flags, -1, 0)
    assert address == _FAR, ctypes.get_errno()
    array = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
    assert abs(np.empty(1 << 22, np.uint8).ctypes.data - address) > 1 << 40
    array[:] = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    yield array
    del array
    _LIBC.munmap(address, size)


def test_allocations_that_lie_far_apart_are_gathered(far):
    """One view over all of them would have more bytes than there are addresses: "array is too big"."""
    shape = (256, 512)  # of a row, in float32: 512 KiB
    distant = far.view(np.float32).reshape(8, *shape)
    distant[:] = np.random.default_rng(0).random(distant.shape)
    parts = [np.random.default_rng(1).random((4, *shape), np.float32), distant, np.zeros((2, *shape), np.float32)]
    rows = np.array([11, 3, 4, 13, 0])
    out = np.empty((5, *shape), np.float32)
    NumpyGather(parts).read(rows, (slice(None), slice(None)), out)
    np.testing.assert_array_equal(out, np.concatenate(parts)[rows])


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from(["heap", "far", "shared"])), min_size=1, max_size=9
    ).filter(lambda parts: any(length for length, _ in parts)),
    st.sampled_from([1, 3, 8, 256, 3072]),
    st.integers(0, 2**32 - 1),
)
def test_segments_are_gathered_as_numpy_does(far, parts, size, seed):
    random = np.random.default_rng(seed)
    memory = {"far": far, "shared": _SHARED}
    arrays, used = [], {"far": 0, "shared": 0}
    for length, where in parts:
        if where == "heap":
            arrays.append(random.integers(0, 255, (length, size), np.uint8))
        else:
            start = used[where] + int(random.integers(0, 9))
            used[where] = start + length * size
            arrays.append(memory[where][start : used[where]].reshape(length, size))
    whole = np.concatenate(arrays)
    asked = random.integers(0, len(whole), 40)
    for columns in (slice(None), slice(size // 3, size), np.arange(size)[::2]):
        out = np.zeros((40, *whole[0, columns].shape), np.uint8)
        NumpyGather(arrays).read(asked, (columns,), out)
        np.testing.assert_array_equal(out, whole[asked][:, columns])


def test_record_batches_of_one_allocation_are_one_segment():
    memory = np.arange(6000, dtype=np.uint8)
    parts = [memory[start : start + 300].reshape(100, 3) for start in range(0, 6000, 1000)]
    assert len(NumpyGather(parts)._segments) == 1
    assert len(NumpyGather([part.copy() for part in parts])._segments) == 6


@pytest.mark.parametrize("lengths", [[5], [2, 3], [0, 5, 0]])
@pytest.mark.parametrize("row", [-1, 5, 2**40, -(2**63)])
def test_a_row_out_of_range_is_refused_and_nothing_is_written(lengths, row):
    out = np.full((3, 10), 7, np.uint8)
    gather = NumpyGather([np.zeros((length, 10), np.uint8) for length in lengths])
    with pytest.raises(IndexError, match=f"rows are 0 to 4, got {min(row, 0)} to {max(row, 1)}"):
        gather.read(np.array([0, row, 1]), (slice(None),), out)
    assert (out == 7).all()
