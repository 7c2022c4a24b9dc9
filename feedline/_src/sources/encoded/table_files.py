"""Parquet and Arrow files with columns of bytes, as groups of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feedline._src.sources.formats import arrow, extras
from feedline._src.sources.formats.arrow_columns import naming_file, rows_by_name
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.opening import opening, readable
from feedline._src.sources.formats.parquet import extent_of
from feedline._src.sources.formats.table_file import Columns, TableFile, column_of, is_bytes, names_with_bytes
from feedline._src.stores.remote_object import RemoteObject


def parquet_file(path: Path | RemoteObject, options: OpenOptions) -> TableFile | None:
    """A Parquet file; None if no chosen column holds bytes.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    parquet, pyarrow = extras.require("pyarrow.parquet", "parquet"), extras.require("pyarrow", "parquet")

    def opened(**arguments: Any) -> Any:
        return parquet.ParquetFile(readable(path), memory_map=False, pre_buffer=False, **arguments)

    with naming_file(path, "a Parquet file", "write it again with pyarrow.parquet.write_table"), opened() as file:
        metadata, schema = file.metadata, _without_views(file.schema_arrow)
    names = names_with_bytes(schema, options, path)
    if not names:
        return None
    kinds = kinds_of(schema, names, path)
    lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def read(group: int) -> Columns:
        with opened(metadata=metadata) as reader:
            table = reader.read_row_group(group, columns=names, use_threads=False)
        table.validate()
        columns = {}
        for name in names:
            column = table.column(name)
            if kinds[name] == "bytes":  # 64-bit positions, since chunks of 2 GiB cannot be joined with 32 bits
                column = column.cast(pyarrow.large_binary())
            whole = column.combine_chunks()
            columns[name] = column_of(whole, f"column {name!r}")
        return Columns(columns)

    def extents(group: int) -> list[tuple[int, int]]:
        return [extent_of(metadata, group, name) for name in names]

    return TableFile(kinds, lengths, read, extents=extents)


def _without_views(schema: Any) -> Any:
    """Views as bytes. In Parquet they are only a wish for the type in memory."""
    pyarrow = extras.require("pyarrow", "parquet")
    types = pyarrow.types

    def field(one: Any) -> Any:
        is_view = types.is_binary_view(one.type) or types.is_string_view(one.type)
        return one.with_type(pyarrow.large_binary()) if is_view else one

    return pyarrow.schema([field(one) for one in schema])


def arrow_file(path: Path, options: OpenOptions) -> TableFile | None:
    """An Arrow file or stream; None if no chosen column holds bytes.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    with naming_file(path, "an Arrow file", arrow.REWRITE), opening(path) as file:
        whole = np.asarray(np.memmap(file, np.uint8, "r"))
        schema, batches = arrow.batches_of(whole)
    names = names_with_bytes(schema, options, path)
    if not names:
        return None
    kinds = kinds_of(schema, names, path)
    with naming_file(path, "an Arrow file", arrow.REWRITE):
        groups = _mapped(whole, batches, names)
        if groups is not None:
            lengths = [count for count, _ in groups]
            return TableFile(kinds, lengths, lambda group: groups[group][1], reads="mapped")
        if not arrow.is_file(whole):
            raise ValueError("it is a compressed stream, which has no index of its record batches")
        return _compressed(path, schema, kinds)


def _mapped(whole: Any, batches: Iterator[Any], names: Sequence[str]) -> list[tuple[int, Columns]] | None:
    """Rows and columns of each record batch, as views of the mapped file; None if it is compressed."""
    start = whole.ctypes.data

    def bytes_of(buffer: Any) -> Any:
        return whole[buffer.address - start :][: buffer.size]

    groups = []
    for batch in batches:
        batch.validate()  # invalid lengths would make pyarrow abort the process
        arrays = {name: batch.column(name) for name in names}
        buffers = [b for array in arrays.values() for b in array.buffers() if b is not None and b.size]
        if not all(0 <= b.address - start <= len(whole) - b.size for b in buffers):
            return None  # pyarrow has decompressed them into other memory
        columns = {name: column_of(array, f"column {name!r}", bytes_of) for name, array in arrays.items()}
        groups.append((batch.num_rows, Columns(columns)))
    return groups


def _compressed(path: Path, schema: Any, kinds: dict[str, str]) -> TableFile:
    pyarrow, ipc = extras.require("pyarrow", "arrow"), extras.require("pyarrow.ipc", "arrow")

    def reader(names: Sequence[str]) -> Any:
        fields = sorted(schema.get_field_index(name) for name in names)
        options = ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        return ipc.open_file(pyarrow.OSFile(str(path)), options=options)

    def read(group: int) -> Columns:
        batch = reader(list(kinds)).get_batch(group)
        batch.validate()
        return Columns({name: column_of(batch.column(name), f"column {name!r}") for name in kinds})

    narrow = reader([min(kinds, key=lambda name: kinds[name] == "bytes")])  # numbers, if there are any
    lengths = [narrow.get_batch(i).num_rows for i in range(narrow.num_record_batches)]
    return TableFile(kinds, lengths, read)


def kinds_of(schema: Any, names: Sequence[str], path: object) -> dict[str, str]:
    """The type of each column. TypeError: some hold neither bytes nor numbers; it lists all of them."""
    rows = rows_by_name(schema, names, path, lambda kind: "bytes" if is_bytes(kind) else None)
    return {name: row if row == "bytes" else f"{row.dtype}{list(row.shape)}" for name, row in rows.items()}
