"""Arrow IPC (Feather) files and streams: mapped into memory, or read in groups if compressed or with nulls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.files.opening import opening
from feedline._src.formats import extras
from feedline._src.formats.arrow_columns import column_of, kinds_of, names_with_bytes, naming_file, spec_of
from feedline._src.formats.grouped_file import Columns, Group, GroupedFile, TableFile
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.rows import digests

FORMAT = Format("arrow", (".arrow", ".feather"), takes=frozenset({"columns", "cache_bytes"}), extra="arrow")

Array = npt.NDArray[Any]
Spec = dict[str, jax.ShapeDtypeStruct]
_FILE_MARK = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
REWRITE = "write it again with pyarrow.feather.write_feather or pyarrow.ipc.new_file"


def is_mapped(path: Path, options: OpenOptions) -> bool:
    """Whether the rows of a file can be used without copying them: it is not compressed, and has no nulls."""
    return _without_nulls(_numbers(path, options)[1]) is not None


def mapped(path: Path, options: OpenOptions) -> list[dict[str, Array]]:
    """The record batches of a file for which `is_mapped` is true, as views of the mapped file.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    spec, batches = _numbers(path, options)
    trees = _without_nulls(batches)
    if trees is None:
        raise ValueError(f"{path} must be uncompressed and without nulls to be mapped; {REWRITE}")
    return trees or [{name: np.empty((0, *row.shape), row.dtype) for name, row in spec.items()}]


def grouped(path: Path, options: OpenOptions) -> GroupedFile:
    """The record batches of any file without bytes and text, each of which is read when it is needed.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    spec, batches = _numbers(path, options)
    names = sorted(spec)
    if batches is None:
        narrowest = min(names, key=lambda name: math.prod(spec[name].shape) * spec[name].dtype.itemsize)
        lengths = _lengths(path, narrowest)
    else:
        lengths = [batch.row_count for batch in batches]

    def read(leaf: int, group: int) -> Group:
        if batches is None:
            found = _decompressed(path, [names[leaf]], group).by_name[names[leaf]]
        else:
            found = batches[group].by_name[names[leaf]]
        assert isinstance(found, Group)
        return found._replace(values=found.values.copy())  # a cached group must not depend on the file

    return GroupedFile(spec, [lengths] * len(names), read, lambda _: digests.of_file(path))


def table(path: Path, options: OpenOptions) -> TableFile | None:
    """The record batches of a file or stream with columns of bytes; None if no chosen column holds bytes.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    whole, schema, batches = _opened(path)
    names = names_with_bytes(schema, options, path)
    if not names:
        return None
    kinds = kinds_of(schema, names, path)
    views = _views(path, whole, batches, names)
    if views is not None:
        return TableFile(kinds, [batch.row_count for batch in views], views.__getitem__, reads="mapped")
    lengths = _lengths(path, min(kinds, key=lambda name: kinds[name] == "bytes"))  # numbers, if there are any
    return TableFile(kinds, lengths, lambda group: _decompressed(path, names, group))


def _numbers(path: Path, options: OpenOptions) -> tuple[Spec, list[Columns] | None]:
    """The spec of the chosen columns, and each record batch as `_views`."""
    whole, schema, batches = _opened(path)
    spec = spec_of(schema, options, path)
    return spec, _views(path, whole, batches, list(spec))


def _without_nulls(batches: list[Columns] | None) -> list[dict[str, Array]] | None:
    """The arrays of record batches; None if there are nulls in them."""
    columns = None if batches is None else [batch.by_name for batch in batches]
    if columns is None or any(column.null is not None for batch in columns for column in batch.values()):
        return None
    return [{name: group.values for name, group in batch.items() if isinstance(group, Group)} for batch in columns]


def _opened(path: Path) -> tuple[Array, Any, Iterator[Any]]:
    """A mapped file, its schema, and its record batches."""
    with naming_file(path, "an Arrow file", REWRITE), opening(path) as file:
        whole: Array = np.asarray(np.memmap(file, np.uint8, "r"))
        return whole, *batches_of(whole)


def _views(path: Path, whole: Array, batches: Iterator[Any], names: Sequence[str]) -> list[Columns] | None:
    """Some columns of each record batch, as views of the mapped file; None if it is compressed.

    Raises:
      ValueError: it is damaged, or a compressed stream.
    """
    start = whole.ctypes.data

    def bytes_of(buffer: Any) -> Array:
        """The buffer as a view of the array of the whole file, so that it cannot exceed the file."""
        return whole[buffer.address - start :][: buffer.size]

    views: list[Columns] = []
    compressed = False
    with naming_file(path, "an Arrow file", REWRITE):
        for batch in batches:
            batch.validate()  # invalid lengths would make pyarrow abort the process
            arrays = {name: batch.column(name) for name in names}
            buffers = [b for array in arrays.values() for b in array.buffers() if b is not None and b.size]
            compressed = not all(0 <= b.address - start <= len(whole) - b.size for b in buffers)
            if compressed:  # pyarrow has decompressed them into other memory
                break
            views.append(
                Columns({name: column_of(array, f"column {name!r}", bytes_of) for name, array in arrays.items()})
            )
    if compressed and not is_file(whole):
        raise ValueError(
            f"{path} is a compressed stream, which has no index of its record batches; write it as a file: "
            "table = pyarrow.ipc.open_stream(path).read_all(); pyarrow.feather.write_feather(table, 'x.arrow')"
        )
    return None if compressed else views


def _reader(path: Path, names: Sequence[str]) -> Any:
    """A reader of some columns. The file is read, not mapped: a failing disk then is an error, not a SIGBUS."""
    pyarrow, ipc = extras.require("pyarrow", "arrow"), extras.require("pyarrow.ipc", "arrow")
    schema = ipc.open_file(pyarrow.OSFile(str(path))).schema
    options = ipc.IpcReadOptions(
        included_fields=sorted(schema.get_field_index(name) for name in names), use_threads=False
    )
    return ipc.open_file(pyarrow.OSFile(str(path)), options=options)


def _lengths(path: Path, narrowest: str) -> list[int]:
    """The rows of each record batch of a compressed file, of which one column is read."""
    with naming_file(path, "an Arrow file", REWRITE):
        reader = _reader(path, [narrowest])
        return [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]


def _decompressed(path: Path, names: Sequence[str], group: int) -> Columns:
    batch = _reader(path, names).get_batch(group)
    batch.validate()
    return Columns({name: column_of(batch.column(name), f"column {name!r}") for name in names})


def is_file(whole: Array) -> bool:
    """Whether these bytes are an Arrow file; else they may be a stream."""
    return whole[: len(_FILE_MARK)].tobytes() == _FILE_MARK


def batches_of(whole: Array) -> tuple[Any, Iterator[Any]]:
    """The schema of a mapped file or stream, and its record batches, not validated yet."""
    pyarrow, ipc = extras.require("pyarrow", "arrow"), extras.require("pyarrow.ipc", "arrow")
    source = pyarrow.BufferReader(pyarrow.py_buffer(whole))
    if is_file(whole):
        file = ipc.open_file(source)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
    stream = ipc.open_stream(source)  # as datasets.save_to_disk writes them
    return stream.schema, _whole_stream(stream, source, whole)


def _whole_stream(stream: Any, source: Any, whole: Array) -> Iterator[Any]:
    """The record batches of a stream, whose end mark is checked: pyarrow accepts a truncated stream."""
    yield from stream
    if source.tell() != len(whole) or whole[-len(_END_OF_STREAM) :].tobytes() != _END_OF_STREAM:
        raise ValueError("a stream must end with the mark of its end, and this one does not")
