"""Parquet files as groups of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feedline._src.formats import extras
from feedline._src.formats.arrow_columns import (
    column_of,
    kinds_of,
    names_with_bytes,
    naming_file,
    rows_of,
    spec_of,
)
from feedline._src.formats.grouped_file import Columns, Group, GroupedFile, TableFile, memory_bytes
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.opening import digest_of, readable
from feedline._src.formats.registry import Format
from feedline._src.stores.remote_object import RemoteObject

FORMAT = Format("parquet", (".parquet",), takes=frozenset({"columns", "cache_bytes"}), extra="parquet")


def grouped(path: Path | RemoteObject, options: OpenOptions) -> GroupedFile:
    """The row groups of a file, or of an object in a store.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    metadata, schema = _read_footer(path)
    spec = spec_of(schema, options, path)
    names = sorted(spec)
    lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    for name, row in spec.items():
        needed, has = max(lengths, default=0) * math.prod(row.shape) * row.dtype.itemsize, memory_bytes()
        if needed > has:
            raise ValueError(
                f"a column of a row group must fit into memory, and {name!r} of {path} takes {needed} bytes "
                f"of the {has} there are; write it again in smaller row groups if it is not damaged"
            )

    def read(leaf: int, group: int) -> Group:
        column = _read_group(path, metadata, group, [names[leaf]]).column(names[leaf])
        return _joined([rows_of(chunk, f"column {names[leaf]!r}") for chunk in column.chunks])

    def extents(leaf: int, group: int) -> list[tuple[int, int]]:
        return [_extent_of(metadata, group, names[leaf])]

    return GroupedFile(spec, [lengths] * len(names), read, lambda _: digest_of(path), extents)


def table(path: Path | RemoteObject, options: OpenOptions) -> TableFile | None:
    """The row groups of a file with columns of bytes; None if no chosen column holds bytes.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    pyarrow = extras.require("pyarrow", "parquet")
    metadata, schema = _read_footer(path)
    schema = _without_views(schema)
    names = names_with_bytes(schema, options, path)
    if not names:
        return None
    kinds = kinds_of(schema, names, path)
    lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def read(group: int) -> Columns:
        found = _read_group(path, metadata, group, names)
        found.validate()
        columns = {}
        for name in names:
            column = found.column(name)
            if kinds[name] == "bytes":  # 64-bit positions, since chunks of 2 GiB cannot be joined with 32 bits
                column = column.cast(pyarrow.large_binary())
            columns[name] = column_of(column.combine_chunks(), f"column {name!r}")
        return Columns(columns)

    def extents(group: int) -> list[tuple[int, int]]:
        return [_extent_of(metadata, group, name) for name in names]

    return TableFile(kinds, lengths, read, extents=extents)


def _opened(path: Path | RemoteObject, **arguments: Any) -> Any:
    # read, not mapped: a failing disk then is an error, not a SIGBUS
    parquet = extras.require("pyarrow.parquet", "parquet")
    return parquet.ParquetFile(readable(path), memory_map=False, pre_buffer=False, **arguments)


def _read_footer(path: Path | RemoteObject) -> tuple[Any, Any]:
    """The metadata, and the schema as Arrow has it."""
    remedy = "write it again with pyarrow.parquet.write_table"
    with naming_file(path, "a Parquet file", remedy), _opened(path) as file:
        return file.metadata, file.schema_arrow


def _read_group(path: Path | RemoteObject, metadata: Any, group: int, names: Sequence[str]) -> Any:
    # a reader is not thread-safe; a new one is cheap, since the footer is already parsed
    with _opened(path, metadata=metadata) as reader:
        return reader.read_row_group(group, columns=list(names), use_threads=False)


def _without_views(schema: Any) -> Any:
    """Views as bytes. In Parquet they are only a wish for the type in memory."""
    pyarrow = extras.require("pyarrow", "parquet")
    types = pyarrow.types

    def field(one: Any) -> Any:
        is_view = types.is_binary_view(one.type) or types.is_string_view(one.type)
        return one.with_type(pyarrow.large_binary()) if is_view else one

    return pyarrow.schema([field(one) for one in schema])


def _extent_of(metadata: Any, group: int, name: str) -> tuple[int, int]:
    """The offset and length of the bytes of a column in a row group."""
    columns = metadata.row_group(group)
    found = [columns.column(i) for i in range(metadata.num_columns)]
    chunks = [each for each in found if each.path_in_schema.partition(".")[0] == name]
    first = min(
        min(each.dictionary_page_offset or each.data_page_offset, each.data_page_offset) for each in chunks
    )
    return first, sum(each.total_compressed_size for each in chunks)


def _joined(parts: list[Group]) -> Group:
    """The chunks of a column, concatenated into one group."""
    if len(parts) == 1:
        return parts[0]
    null = None
    if any(part.null is not None for part in parts):
        null = np.concatenate([np.zeros(len(p.values), bool) if p.null is None else p.null for p in parts])
    return Group(np.concatenate([part.values for part in parts]), null)
