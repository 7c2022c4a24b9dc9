"""ArrayRecord files, read with the library array_record: records of bytes, or of one dtype."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from feedline._src.errors import warn
from feedline._src.files.file import File, Indices, opening
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, Library, fetched_files
from feedline._src.formats.table import Grouped, by_rows, fields, naming_file
from feedline._src.rows.spec import RowSpec

library: Any = Library("array_record.python.array_record_module", "array-record")
_OPTIONS = "readahead_buffer_size:0,index_storage_option:in_memory"
_BUFFER_BYTES = 1 << 15


def open_array_record(file: File, options: OpenOptions) -> Grouped:
    """The records of a file: bytes, or the fields of a dtype."""
    if options.dtype is None and options.columns is not None:
        raise ValueError(
            "columns chooses fields of a dtype, and records without a dtype are bytes: give open_source "
            "dtype=np.dtype([('image', np.uint8, (32, 32, 3)), ('label', np.int32)]), for example; got only "
            f"columns={options.columns} for {file.name}"
        )
    reader = Reader(file)
    if options.dtype is None:
        return by_rows(
            {"row": "bytes"},
            reader.count,
            lambda leaves, rows: [reader.read(rows)],
            instead=", or if all records have one size, give open_source their dtype",
            close=reader.close,
        )

    def read_rows(leaves: Sequence[int], rows: Indices) -> list[Any]:
        arrays = jax.tree.leaves(_of_dtype(options, file.name, reader.read(rows)))
        return [arrays[leaf] for leaf in leaves]

    none = _of_dtype(options, file.name, [])
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), none)
    return by_rows(RowSpec.of(spec).structs, reader.count, read_rows, close=reader.close)


FORMAT = Format(
    "array_record",
    (".array_record", ".arrayrecord"),
    takes=frozenset({"dtype", "columns"}),
    extra="array-record",
    open=open_array_record,
    files=fetched_files,
)


class Reader:
    """An ArrayRecord file. Thread-safe. After `close`, the next read opens the file again.

    `close` only drops the reference to the library's reader, since another thread may still use it.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._opened: tuple[str, Any] | None = None
        """The path that was opened, and the library's reader for it."""
        self.count = file.with_path(lambda path: self._open(path).num_records())
        # the library returns None for files that its old versions wrote
        written = file.with_path(lambda path: self._open(path).writer_options_string()) or ""
        group = re.search(r"group_size:(\d+)", written)
        if group and int(group[1]) > 1:
            warn(
                f"{file.name} was written in groups of {group[1]} records, so reading one record decompresses "
                "its whole group; write it again with ArrayRecordWriter(path, 'group_size:1')"
            )

    def read(self, records: Indices) -> list[bytes]:
        """The records with these numbers."""
        found: list[bytes] = self._file.with_path(lambda path: self._open(path).read(records.tolist()))
        return found

    def close(self) -> None:
        self._opened = None

    def _open(self, path: str) -> Any:
        """Return the reader of `path`. If `path` is a new str object, the file was fetched again: reopen it."""
        opened = self._opened
        if opened is not None and opened[0] is path:
            return opened[1]
        with opening(Path(path)):
            pass  # raises errors that say what to do, unlike the library's
        remedy = "write it again with ArrayRecordWriter(path, 'group_size:1')"
        with naming_file(self._file.name, "an ArrayRecord file", remedy):
            try:
                reader = library.ArrayRecordReader(path, options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES)
                if not reader.ok():
                    reader.read([0])  # raises an error that says what is wrong
            finally:
                self._file.check()  # a change of the file explains the error better than the library does
        self._opened = path, reader
        return reader


def _of_dtype(options: OpenOptions, path: str, records: list[bytes]) -> Any:
    dtype = np.dtype(options.dtype)
    if others := [record for record in records if len(record) != dtype.itemsize]:
        raise ValueError(
            f"every record must have the {dtype.itemsize} bytes of dtype {dtype}, but a record has "
            f"{len(others[0])} bytes; pass the right dtype, or, if records differ in length, leave dtype out and "
            "use feedline.decoded"
        )
    return options.named(fields(np.frombuffer(b"".join(records), dtype)), path)
