"""The gather, in C and in NumPy, against indexing: any segments, distances between rows, dtypes and columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline import Blocks, Order
from feedline._src.native.gather import RowGather, rows_at_positions
from feedline._src.native.library import library
from feedline._src.order.epoch import epoch_order, rows_at
from feedline._src.sources.arrays import NumpyRows

has_library = pytest.mark.skipif(library() is None, reason="the library was not built")
READERS = [NumpyRows, pytest.param(RowGather, marks=has_library)]
DTYPES = [np.bool_, np.uint8, np.int16, np.float32, np.float64, np.complex128, ">i8", ">f4"]


@st.composite
def columns(draw, size):
    start, stop = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    listed = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    return draw(st.sampled_from([slice(None), slice(start, stop), np.array(listed)]))


@st.composite
def gathers(draw):
    """Segments, the wanted columns and rows, the space between rows of the output, and `stream` of `read`."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 16, 17]), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
    parts = []
    for length in lengths:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        distance = draw(st.sampled_from([size, size + 3, 5 * size, max(1, size // 2)]))  # also rows that overlap
        memory = np.frombuffer(random.bytes(length * distance + size + 64), np.uint8)
        strides = distance, *np.empty((1, *shape), dtype).strides[1:]
        parts.append(np.ndarray((length, *shape), dtype, memory, int(random.integers(0, 64)), strides))
    wanted = tuple(draw(columns(size)) for size in shape)
    rows = random.integers(0, sum(lengths), draw(st.integers(0, 40)))
    return parts, wanted, rows, draw(st.sampled_from([1, 2])), draw(st.booleans())


def by_numpy(parts, wanted, rows):
    found = np.concatenate(parts)[rows]
    for axis, column in enumerate(wanted, start=1):
        found = found[(slice(None),) * axis + (column,)]
    return found


@pytest.mark.parametrize("reader", READERS)
@given(gather=gathers())
@settings(max_examples=200)
def test_rows_are_those_of_numpys_indexing(reader, gather):
    parts, wanted, rows, apart, stream = gather
    expected = by_numpy(parts, wanted, rows)
    room = np.full((len(rows) * apart, *expected.shape[1:]), 7, expected.dtype)
    if reader is RowGather:
        RowGather(parts).read(rows, wanted, room[::apart], stream)
    else:
        reader(parts).read(rows, wanted, room[::apart])
    assert room[::apart].tobytes() == expected.tobytes()
    if apart > 1:
        assert (room[1::apart] == np.array(7).astype(expected.dtype)).all(), "nothing between the rows is written"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("wrong", [-1, 5, 2**62, -(2**63)])
@pytest.mark.parametrize("parts", [[5], [2, 3], [0, 5, 0]])
def test_a_row_out_of_range_is_an_error_and_nothing_is_written(reader, parts, wrong):
    out = np.full((3, 4), 7)
    gather = reader([np.zeros((length, 4), np.int64) for length in parts])
    with pytest.raises(IndexError, match=rf"^rows are 0 to 4, got .*{wrong}"):
        gather.read(np.array([0, wrong, 1]), (slice(None),), out)
    assert (out == 7).all()


READ_ONLY = np.zeros((3, 4), np.int32)
READ_ONLY.flags.writeable = False


@has_library
@pytest.mark.parametrize("out", [READ_ONLY, *(np.zeros(shape, np.int32) for shape in [(2, 4), (3, 3), (3,)])])
def test_memory_of_another_shape_or_that_is_read_only_is_refused(out):
    gather = RowGather([np.zeros((5, 4), np.int32)])
    with pytest.raises(ValueError, match=r"^out must be writeable and have the shape \[3, 4\]$"):
        gather.read(np.arange(3), (slice(None),), out)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("stored", ["<i4", ">i4"])
@pytest.mark.parametrize(
    "out",
    [
        *(np.zeros((3, 4), dtype) for dtype in ("<i4", ">i4", "<f8", ">f8")),
        np.zeros((3, 4), np.int32, "F"),
        np.zeros((3, 8), np.int32)[:, ::2],
    ],
)
def test_other_dtypes_and_strides_are_written_as_numpy_writes_them(reader, stored, out):
    values = np.arange(20, dtype=stored).reshape(5, 4)
    reader([values]).read(np.array([4, 0, 2]), (slice(None),), out)
    np.testing.assert_array_equal(out, values[[4, 0, 2]])


@has_library
@pytest.mark.parametrize("lengths", [[1] * 3000, [10**6, *[1] * 100], [*[1] * 100, 10**6], [7, 0, 0, 9, 0, 300]])
def test_every_row_is_found_in_its_segment(lengths):
    parts = [np.arange(length, dtype=np.int64) + 10**7 * i for i, length in enumerate(lengths)]
    rows = np.random.default_rng(0).integers(0, sum(lengths), 5000)
    out = np.empty(5000, np.int64)
    RowGather(parts).read(rows, (), out)
    np.testing.assert_array_equal(out, np.concatenate(parts)[rows])


# --- the rows at some positions of an epoch, of every leaf in one call ---


@st.composite
def parts_of_a_batch(draw):
    """(lengths of file shards, leaves as (row shape, dtype), order, epoch, positions as a range or an array)."""
    lengths = draw(st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any))
    shapes = st.lists(st.integers(1, 9), max_size=2).map(tuple)
    leaf = st.tuples(shapes, st.sampled_from([np.uint8, np.int32, np.float64, ">i2"]))
    leaves = draw(st.lists(leaf, min_size=1, max_size=4))
    order = Order(draw(st.integers(0, 9)), draw(st.sampled_from([False, True, Blocks(7, 3)])))
    n = sum(lengths)
    first, last = sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    some = st.lists(st.integers(0, n - 1), max_size=40).map(lambda drawn: np.array(drawn, np.int64))
    return lengths, leaves, order, draw(st.integers(0, 5)), draw(st.just(range(first, last)) | some)


@has_library
@given(part=parts_of_a_batch(), data=st.data())
@settings(max_examples=200)
def test_each_leaf_has_the_rows_at_its_positions(part, data):
    lengths, leaves, order, epoch, positions = part
    random = np.random.default_rng(len(lengths))
    expected_rows = rows_at(order, sum(lengths), epoch, np.asarray(positions, np.int64))
    copies, outs, expected, gathers = [], [], [], []
    for shape, dtype in leaves:
        parts = [random.integers(0, 100, (length, *shape)).astype(dtype) for length in lengths]
        columns = tuple(
            data.draw(st.sampled_from([slice(None), slice(0, 1), slice(size // 2, size)])) for size in shape
        )
        expected.append(by_numpy(parts, columns, expected_rows))
        outs.append(np.empty(expected[-1].shape, dtype))
        gathers.append(RowGather(parts))
        copies.append(gathers[-1].copy(len(positions), columns, outs[-1]))
    found = rows_at_positions(epoch_order(order, sum(lengths), epoch), positions, copies)
    np.testing.assert_array_equal(found, expected_rows)
    for out, wanted in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out, wanted)


@has_library
@pytest.mark.parametrize(("first", "message"), [(8, r"10 \(code 2\)"), (5, r"5 \(code 1\)")])
def test_a_position_or_a_row_out_of_range_is_an_error(first, message):
    out = np.zeros((3, 4), np.int32)
    gather = RowGather([np.ones((5, 4), np.int32)])
    order, copy = epoch_order(Order(shuffle=False), 10, 0), gather.copy(3, (slice(None),), out)
    with pytest.raises(IndexError, match=rf"must be in \[0, 10\), got {message}"):
        rows_at_positions(order, range(first, first + 3), [copy])
    assert (out == 0).all()
