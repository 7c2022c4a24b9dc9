"""Arrow IPC (Feather) files and streams: numbers used where they lie, or record batches decoded by pyarrow."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File, opening
from feedline._src.formats.arrow_columns import column_of, naming_file, readable, spec_of
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, require
from feedline._src.formats.table import Column, FileArray, Grouped, Leaf

Array = npt.NDArray[Any]
PlaceOf = Callable[[int, int], int | None]
"""(address, length) → where in the file these bytes of memory lie; None: they are no bytes of the file."""
_FILE_MARK = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
REWRITE = "write it again with pyarrow.feather.write_feather or pyarrow.ipc.new_file"


def open_file(file: File, options: OpenOptions) -> Grouped:
    """The record batches of a file or a stream.

    Numbers without compression and nulls are used where they lie. To find their places, pyarrow reads an object in
    a store once, while it is fetched; it would not survive that a mapped file of the cache is truncated.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    with contextlib.ExitStack() as stack:
        with naming_file(file.name, "an Arrow file", REWRITE):
            schema, batches, place_of = stack.enter_context(_passed(file))
        spec = spec_of(schema, options, file.name)
        names = sorted(spec)
        with naming_file(file.name, "an Arrow file", REWRITE):
            arrays, views = _in_file(batches, list(spec), file, place_of)
    if any(isinstance(leaf, str) for leaf in spec.values()):
        arrays = None  # also of a file without record batches
    if views is not None:
        masks = [[null for batch in views if (null := batch[name].null) is not None] for name in names]
        return Grouped(
            spec,
            [[batch[names[0]].rows for batch in views]] * len(names),
            lambda leaf, group: views[group][names[leaf]],
            in_place=True,
            nulls={leaf: sum(int(null.sum()) for null in some) for leaf, some in enumerate(masks)},
            arrays=None if arrays is None else lambda: arrays or [_nothing(spec)],
        )
    with naming_file(file.name, "an Arrow file", REWRITE):
        is_file = file.samples([(0, len(_FILE_MARK))])[0] == _FILE_MARK
        decoded = (_of_file if is_file else _of_stream)(file, schema)
        if arrays is None:
            narrowest = min(names, key=lambda name: _row_bytes(spec[name]))
            lengths = [decoded.batch(number, narrowest).num_rows for number in range(decoded.total)]
        else:
            lengths = [len(batch[names[0]]) for batch in arrays]

    def read(leaf: int, group: int) -> Column:
        batch = decoded.batch(group, names[leaf])
        batch.validate()  # invalid lengths would make pyarrow abort the process
        # copied: views would keep alive whatever pyarrow has read with them
        return column_of(batch.column(names[leaf]), f"column {names[leaf]!r}").copied()

    return Grouped(
        spec,
        [lengths] * len(names),
        read,
        extents=lambda leaf, group: [decoded.extent(group)],
        arrays=None if arrays is None else lambda: arrays or [_nothing(spec)],
    )


def _row_bytes(leaf: Leaf) -> float:
    return math.inf if isinstance(leaf, str) else math.prod(leaf.shape) * leaf.dtype.itemsize


FORMAT = Format(
    "arrow", (".arrow", ".feather"), takes=frozenset({"columns", "cache_bytes"}), extra="arrow", open=open_file
)


# --- where record batches lie ---


@contextlib.contextmanager
def _passed(file: File) -> Iterator[tuple[Any, Iterator[Any], PlaceOf]]:
    """The schema of a file, its record batches one by one, and where the memory of the present one lies."""
    pyarrow = require("pyarrow", "arrow")
    if file.in_store:
        with file.open(sequential=True) as opened:
            noted = _Noted(opened)
            schema, batches = batches_of(pyarrow.PythonFile(noted, mode="r"))
            yield schema, noted.forgetting(batches), noted.place_of
        return
    with opening(Path(file.path())) as opened:
        whole: Array = np.asarray(np.memmap(opened, np.uint8, "r"))
    start = whole.ctypes.data

    def place_of(address: int, length: int) -> int | None:
        return address - start if 0 <= address - start <= len(whole) - length else None

    yield *batches_of(pyarrow.BufferReader(pyarrow.py_buffer(whole))), place_of


class _Noted(io.RawIOBase):
    """A file object that notes where the bytes lie that pyarrow got from it. pyarrow uses them without a copy."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._reads: list[tuple[int, int, bytes]] = []
        """Address, place and data of each read; the data are kept, so that no other memory has their address."""

    def read(self, size: int = -1) -> bytes:
        """Read, and note it."""
        place, data = self._file.tell(), self._file.read(size)
        if data:
            self._reads.append((np.frombuffer(data, np.uint8).ctypes.data, place, data))
        return data

    def place_of(self, address: int, length: int) -> int | None:
        """See `PlaceOf`."""
        for start, place, data in self._reads:
            if start <= address and address + length <= start + len(data):
                return place + address - start
        return None

    def forgetting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The record batches, with what was read noted for the present one alone."""
        for batch in batches:
            yield batch
            self._reads.clear()

    def readable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """See `io.IOBase`."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """See `io.IOBase`."""
        return self._file.tell()


def _in_file(
    batches: Iterator[Any], names: Sequence[str], file: File, place_of: PlaceOf
) -> tuple[list[dict[str, Any]] | None, list[dict[str, Column]] | None]:
    """The columns of all record batches, as arrays in the file and as views of memory.

    Returns:
      The arrays, None if there are bytes or nulls; and the views, None of an object in a store. Both are None if
      the file is compressed.
    """
    arrays: list[dict[str, Any]] | None = []
    views: list[dict[str, Column]] | None = None if file.in_store else []
    for batch in batches:
        batch.validate()  # invalid lengths would make pyarrow abort the process
        columns = {name: batch.column(name) for name in names}
        buffers = [buffer for column in columns.values() for buffer in column.buffers() if buffer is not None]
        if any(buffer.size and place_of(buffer.address, buffer.size) is None for buffer in buffers):
            return None, None  # pyarrow has decompressed them into other memory
        found = {name: column_of(column, f"column {name!r}") for name, column in columns.items()}
        if any(not isinstance(column, Column) or column.null is not None for column in found.values()):
            arrays = None
        if arrays is not None:
            arrays.append({name: _array(column, file, place_of) for name, column in found.items()})
        if views is not None:
            views.append(found)
        elif arrays is None:
            return None, None
    return arrays, views


def _array(column: Any, file: File, place_of: PlaceOf) -> FileArray | Array:
    """Numbers of a record batch; those that were unpacked from bits are in memory."""
    values: Array = column.values
    place = place_of(values.ctypes.data, values.nbytes)
    return values if place is None else FileArray.of(file, values.dtype, values.shape, place)


def _nothing(spec: dict[str, Any]) -> dict[str, Array]:
    return {name: np.empty((0, *row.shape), row.dtype) for name, row in spec.items()}


def batches_of(source: Any) -> tuple[Any, Iterator[Any]]:
    """The schema of a file or a stream, a `pyarrow.NativeFile`, and its record batches, not validated yet."""
    ipc = require("pyarrow.ipc", "arrow")
    mark = source.read(len(_FILE_MARK))
    source.seek(0)
    if mark == _FILE_MARK:
        file = ipc.open_file(source)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
    stream = ipc.open_stream(source)  # as datasets.save_to_disk writes them
    return stream.schema, _whole_stream(stream, source)


def _whole_stream(stream: Any, source: Any) -> Iterator[Any]:
    """The record batches of a stream, whose end mark is checked."""
    yield from stream
    _check_end(source)


def _check_end(source: Any) -> None:
    """Refuse a stream that was truncated between two record batches, which pyarrow accepts."""
    end = source.tell()
    source.seek(max(0, end - len(_END_OF_STREAM)))
    if end != source.size() or source.read() != _END_OF_STREAM:
        raise ValueError("a stream must end with the mark of its end, and this one does not")


# --- record batches that pyarrow decodes ---


class _Decoded(NamedTuple):
    """Record batches, which are read and not mapped: a disk that fails then is an error, not a SIGBUS.

    Attributes:
      total: how many there are.
      batch: (number, name) → a record batch with this column alone, not validated.
      extent: number → its offset in the file, and its length.
    """

    total: int
    batch: Callable[[int, str], Any]
    extent: Callable[[int], tuple[int, int]]


def _of_file(file: File, schema: Any) -> _Decoded:
    ipc = require("pyarrow.ipc", "arrow")
    with readable(file) as source:
        count = ipc.open_file(source).num_record_batches

    def batch(number: int, name: str) -> Any:
        with readable(file) as source:
            return ipc.open_file(source, options=_only(name, schema)).get_batch(number)

    def extent(number: int) -> tuple[int, int]:
        # roughly: pyarrow does not say where a record batch lies, and most writers make all equally long
        start, stop = (file.size * i // count for i in (number, number + 1))
        return start, stop - start

    return _Decoded(count, batch, extent)


def _of_stream(file: File, schema: Any) -> _Decoded:
    """The record batches of a stream, which has no index of them: it is read once to find where they lie."""
    pyarrow, ipc = require("pyarrow", "arrow"), require("pyarrow.ipc", "arrow")
    places, end = list[int](), 0
    with readable(file, sequential=True) as source:
        messages = ipc.MessageReader.open_stream(source)
        with contextlib.suppress(StopIteration):
            while True:
                kind, start, end = messages.read_next_message().type, end, source.tell()
                places += [start] if kind == "record batch" else []
        _check_end(source)
    (head,) = file.read(np.array([0]), np.array([(places or [end])[0]]))  # the schema, and dictionaries

    def batch(number: int, name: str) -> Any:
        (data,) = file.read(*np.array(extent(number)).reshape(2, 1))
        return ipc.open_stream(pyarrow.BufferReader(head + data), options=_only(name, schema)).read_next_batch()

    def extent(number: int) -> tuple[int, int]:
        start, stop = [*places, end][number : number + 2]
        return start, stop - start

    return _Decoded(len(places), batch, extent)


def _only(name: str, schema: Any) -> Any:
    """Options that read one column."""
    ipc = require("pyarrow.ipc", "arrow")
    return ipc.IpcReadOptions(included_fields=[schema.get_field_index(name)], use_threads=False)
