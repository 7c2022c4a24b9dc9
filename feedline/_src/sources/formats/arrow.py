"""Arrow IPC (Feather) files and streams: mapped into memory, or read in groups if compressed or with nulls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.rows import digests
from feedline._src.sources.formats import extras
from feedline._src.sources.formats.arrow_columns import naming_file, rows_of, spec_of
from feedline._src.sources.formats.grouped_file import Group, GroupedFile
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.opening import opening

Array = npt.NDArray[Any]
Spec = dict[str, jax.ShapeDtypeStruct]
SUFFIXES = (".arrow", ".feather")
_FILE_MARK = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
REWRITE = "write it again with pyarrow.feather.write_feather or pyarrow.ipc.new_file"


def is_mapped(path: Path, options: OpenOptions) -> bool:
    """Whether the rows of a file can be used without copying them: it is not compressed, and has no nulls."""
    _, groups = _groups(path, options)
    return groups is not None and all(group.null is None for batch in groups for group in batch.values())


def mapped(path: Path, options: OpenOptions) -> list[dict[str, Array]]:
    """The record batches of a file for which `is_mapped` is true, as views of the mapped file.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    spec, groups = _groups(path, options)
    if groups is None or any(group.null is not None for batch in groups for group in batch.values()):
        raise ValueError(f"{path} must be uncompressed and without nulls to be mapped; {REWRITE}")
    trees = [{name: group.values for name, group in batch.items()} for batch in groups]
    return trees or [{name: np.empty((0, *row.shape), row.dtype) for name, row in spec.items()}]


def grouped(path: Path, options: OpenOptions) -> GroupedFile:
    """The record batches of any file, each of which is read when it is needed.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    spec, groups = _groups(path, options)
    names = sorted(spec)
    if groups is None:
        return _compressed(path, spec)

    def read(leaf: int, group: int) -> Group:
        found = groups[group][names[leaf]]
        return found._replace(values=found.values.copy())  # a cached group must not depend on the file

    lengths = [[len(batch[name].values) for batch in groups] for name in names]
    return GroupedFile(spec, lengths, read, lambda _: digests.of_file(path))


def _compressed(path: Path, spec: Spec) -> GroupedFile:
    pyarrow, ipc = extras.require("pyarrow", "arrow"), extras.require("pyarrow.ipc", "arrow")
    names = sorted(spec)

    def reader(name: str) -> Any:
        """A reader of one column. The file is read, not mapped: a failing disk then is an error, not a SIGBUS."""
        index = schema.get_field_index(name)
        return ipc.open_file(
            pyarrow.OSFile(str(path)), options=ipc.IpcReadOptions(included_fields=[index], use_threads=False)
        )

    def read(leaf: int, group: int) -> Group:
        batch = reader(names[leaf]).get_batch(group)
        batch.validate()
        return rows_of(batch.column(0), f"column {names[leaf]!r}")

    with naming_file(path, "an Arrow file", REWRITE):
        schema = ipc.open_file(pyarrow.OSFile(str(path))).schema
        narrowest = reader(min(names, key=lambda name: math.prod(spec[name].shape) * spec[name].dtype.itemsize))
        lengths = [narrowest.get_batch(i).num_rows for i in range(narrowest.num_record_batches)]
    return GroupedFile(spec, [lengths] * len(names), read, lambda _: digests.of_file(path))


def _groups(path: Path, options: OpenOptions) -> tuple[Spec, list[dict[str, Group]] | None]:
    """The spec of the chosen columns; and for each record batch their rows, as views of the mapped file.

    The second is None if the file is compressed.
    """
    with naming_file(path, "an Arrow file", REWRITE), opening(path) as file:
        whole: Array = np.asarray(np.memmap(file, np.uint8, "r"))
        schema, batches = batches_of(whole)
    spec = spec_of(schema, options, path)
    start = whole.ctypes.data

    def bytes_of(buffer: Any) -> Array:
        """The buffer as a view of the array of the whole file, so that it cannot exceed the file."""
        return whole[buffer.address - start :][: buffer.size]

    groups: list[dict[str, Group]] = []
    compressed = False
    with naming_file(path, "an Arrow file", REWRITE):
        for batch in batches:
            batch.validate()  # invalid lengths would make pyarrow abort the process
            columns = {name: batch.column(name) for name in spec}
            buffers = [b for column in columns.values() for b in column.buffers() if b is not None and b.size]
            compressed = not all(0 <= b.address - start <= len(whole) - b.size for b in buffers)
            if compressed:  # pyarrow has decompressed them into other memory
                break
            groups.append({name: rows_of(columns[name], f"column {name!r}", bytes_of) for name in spec})
    if compressed and not is_file(whole):
        raise ValueError(
            f"{path} is a compressed stream, which has no index of its record batches; write it as a file: "
            "table = pyarrow.ipc.open_stream(path).read_all(); pyarrow.feather.write_feather(table, 'x.arrow')"
        )
    return spec, None if compressed else groups


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
