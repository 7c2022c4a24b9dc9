"""Arrow IPC (Feather) files and streams: mapped into memory, or decoded by record batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File
from feedline._src.files.opening import opening
from feedline._src.formats import extras
from feedline._src.formats.arrow_columns import column_of, naming_file, readable, spec_of
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.formats.table import ByteColumn, Column, Grouped, NumberColumn

Array = npt.NDArray[Any]
_FILE_MARK = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
REWRITE = "write it again with pyarrow.feather.write_feather or pyarrow.ipc.new_file"


def is_mapped(path: Path, options: OpenOptions) -> bool:
    """Whether the rows of a file can be used without copying them: it is not compressed, and has no nulls."""
    return _without_nulls(_mapped(path, options)[1]) is not None


def mapped(path: Path, options: OpenOptions) -> list[dict[str, Array]]:
    """The record batches of a file for which `is_mapped` is true, as views of the mapped file.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    spec, batches = _mapped(path, options)
    trees = _without_nulls(batches)
    if trees is None:
        raise ValueError(f"{path} must be uncompressed and without nulls to be mapped; {REWRITE}")
    return trees or [{name: np.empty((0, *row.shape), row.dtype) for name, row in spec.items()}]


def open_file(file: File, options: OpenOptions) -> Grouped:
    """The record batches of a file or a stream. Those of an uncompressed local file are used where they lie.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    if not file.in_store:  # a file of the cache may be truncated, which pyarrow would not survive if it was mapped
        spec, views = _mapped(Path(file.path()), options)
        if views is not None:
            return _in_place(spec, views)
    with naming_file(file.name, "an Arrow file", REWRITE):
        is_file = file.samples([(0, len(_FILE_MARK))])[0] == _FILE_MARK
        batches = _BatchesOfFile(file) if is_file else _BatchesOfStream(file)
    spec = spec_of(batches.schema, options, file.name)
    names = sorted(spec)
    with naming_file(file.name, "an Arrow file", REWRITE):
        lengths = batches.lengths(spec)

    def read(leaf: int, group: int) -> Column:
        batch = batches.batch(group, names[leaf])
        batch.validate()  # invalid lengths would make pyarrow abort the process
        # copied: views would keep alive whatever pyarrow has read with them
        return column_of(batch.column(names[leaf]), f"column {names[leaf]!r}").copied()

    return Grouped(spec, [lengths] * len(names), read, extents=lambda leaf, group: [batches.extent(group)])


def _in_place(spec: dict[str, Any], views: list[dict[str, Column]]) -> Grouped:
    """Record batches that lie in memory."""
    names = sorted(spec)
    masks = {leaf: [batch[name].null for batch in views] for leaf, name in enumerate(names)}
    return Grouped(
        spec,
        [[next(iter(batch.values())).rows for batch in views]] * len(names),
        lambda leaf, group: views[group][names[leaf]],
        in_place=True,
        nulls={leaf: sum(int(mask.sum()) for mask in some if mask is not None) for leaf, some in masks.items()},
    )


FORMAT = Format(
    "arrow", (".arrow", ".feather"), takes=frozenset({"columns", "cache_bytes"}), extra="arrow", open=open_file
)


class _Batches:
    """The record batches of a file, of each of which one column is read by pyarrow. It is read, not mapped: a disk
    that fails then is an error, not a SIGBUS."""

    def __init__(self, file: File, schema: Any) -> None:
        self._file, self.schema = file, schema
        self._ipc = extras.require("pyarrow.ipc", "arrow")

    def batch(self, group: int, name: str) -> Any:
        """A record batch with one column, not validated."""
        raise NotImplementedError

    def lengths(self, spec: dict[str, Any]) -> list[int]:
        """The rows of each record batch, of which the column is read that takes the fewest bytes."""

        def size(name: str) -> float:
            row = spec[name]
            return math.inf if isinstance(row, str) else math.prod(row.shape) * row.dtype.itemsize

        return [self.batch(group, min(spec, key=size)).num_rows for group in range(len(self))]

    def __len__(self) -> int:
        raise NotImplementedError

    def extent(self, group: int) -> tuple[int, int]:
        """The offset and length of a record batch."""
        raise NotImplementedError

    def _options(self, name: str) -> Any:
        return self._ipc.IpcReadOptions(included_fields=[self.schema.get_field_index(name)], use_threads=False)


class _BatchesOfFile(_Batches):
    def __init__(self, file: File) -> None:
        with readable(file) as source:
            reader = extras.require("pyarrow.ipc", "arrow").open_file(source)
            super().__init__(file, reader.schema)
            self._count: int = reader.num_record_batches

    def batch(self, group: int, name: str) -> Any:
        with readable(self._file) as source:
            return self._ipc.open_file(source, options=self._options(name)).get_batch(group)

    def __len__(self) -> int:
        return self._count

    def extent(self, group: int) -> tuple[int, int]:
        """Roughly: pyarrow does not say where a record batch lies, and most writers make all equally long."""
        start, stop = (self._file.size * i // self._count for i in (group, group + 1))
        return start, stop - start


class _BatchesOfStream(_Batches):
    """Those of a stream, which has no index of them: it is read once to find where they lie."""

    def __init__(self, file: File) -> None:
        pyarrow, ipc = extras.require("pyarrow", "arrow"), extras.require("pyarrow.ipc", "arrow")
        ends, starts = [0], list[int]()
        with readable(file, sequential=True) as source:
            messages = ipc.MessageReader.open_stream(source)
            for message in iter(functools.partial(_next_message, messages), None):
                if message.type == "record batch":
                    starts.append(ends[-1])
                ends.append(source.tell())
            _check_end(source.tell(), file.size, file.samples([(max(0, file.size - 8), 8)])[0])
        self._starts, self._end = starts, ends[-1]
        self._head = file.read(np.array([0]), np.array([(starts or ends)[0]]))[0]  # the schema, and dictionaries
        super().__init__(file, ipc.open_stream(pyarrow.BufferReader(self._head)).schema)

    def batch(self, group: int, name: str) -> Any:
        offset, length = self.extent(group)
        data = self._head + self._file.read(np.array([offset]), np.array([length]))[0]
        source = extras.require("pyarrow", "arrow").BufferReader(data)
        return self._ipc.open_stream(source, options=self._options(name)).read_next_batch()

    def __len__(self) -> int:
        return len(self._starts)

    def extent(self, group: int) -> tuple[int, int]:
        start, stop = [*self._starts, self._end][group : group + 2]
        return start, stop - start


def _next_message(messages: Any) -> Any:
    try:
        return messages.read_next_message()
    except StopIteration:
        return None


def _check_end(position: int, size: int, last: bytes) -> None:
    """Refuse a stream that was truncated between two record batches, which pyarrow accepts."""
    if position != size or last != _END_OF_STREAM:
        raise ValueError("a stream must end with the mark of its end, and this one does not")


# --- mapped files ---


def _mapped(path: Path, options: OpenOptions) -> tuple[dict[str, Any], list[dict[str, Column]] | None]:
    """The spec of the chosen columns, and each record batch as `_views`."""
    with naming_file(path, "an Arrow file", REWRITE), opening(path) as file:
        whole: Array = np.asarray(np.memmap(file, np.uint8, "r"))
        schema, _ = batches_of(whole)
    spec = spec_of(schema, options, path)
    with naming_file(path, "an Arrow file", REWRITE):
        return spec, _views(whole, list(spec))


def _without_nulls(batches: list[dict[str, Column]] | None) -> list[dict[str, Array]] | None:
    """The arrays of record batches; None if there are nulls in them."""
    columns = [column for batch in batches or [] for column in batch.values()]
    if batches is None or any(isinstance(c, ByteColumn) or c.null is not None for c in columns):
        return None
    return [{name: c.values for name, c in batch.items() if isinstance(c, NumberColumn)} for batch in batches]


def _views(whole: Array, names: Sequence[str]) -> list[dict[str, Column]] | None:
    """Some columns of each record batch, as views of the mapped file; None if it is compressed.

    Raises:
      ValueError: it is damaged.
    """
    start = whole.ctypes.data

    def bytes_of(buffer: Any) -> Array:
        """The buffer as a view of the array of the whole file, so that it cannot exceed the file."""
        return whole[buffer.address - start :][: buffer.size]

    views: list[dict[str, Column]] = []
    for batch in batches_of(whole)[1]:
        batch.validate()  # invalid lengths would make pyarrow abort the process
        arrays = {name: batch.column(name) for name in names}
        buffers = [b for array in arrays.values() for b in array.buffers() if b is not None and b.size]
        if not all(0 <= b.address - start <= len(whole) - b.size for b in buffers):
            return None  # pyarrow has decompressed them into other memory
        views.append({name: column_of(array, f"column {name!r}", bytes_of) for name, array in arrays.items()})
    return views


def batches_of(whole: Array) -> tuple[Any, Iterator[Any]]:
    """The schema of a mapped file or stream, and its record batches, not validated yet."""
    pyarrow, ipc = extras.require("pyarrow", "arrow"), extras.require("pyarrow.ipc", "arrow")
    source = pyarrow.BufferReader(pyarrow.py_buffer(whole))
    if whole[: len(_FILE_MARK)].tobytes() == _FILE_MARK:
        file = ipc.open_file(source)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
    stream = ipc.open_stream(source)  # as datasets.save_to_disk writes them
    return stream.schema, _whole_stream(stream, source, whole)


def _whole_stream(stream: Any, source: Any, whole: Array) -> Iterator[Any]:
    """The record batches of a stream, whose end mark is checked."""
    yield from stream
    _check_end(source.tell(), len(whole), whole[-len(_END_OF_STREAM) :].tobytes())
