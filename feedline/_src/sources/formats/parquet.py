"""Parquet files as groups of rows: one read gives one column of one row group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from feedline._src.sources.formats import extras
from feedline._src.sources.formats.arrow_columns import naming_file, rows_of, spec_of
from feedline._src.sources.formats.grouped_file import Group, GroupedFile, memory_bytes
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.opening import digest_of, readable
from feedline._src.stores.remote_object import RemoteObject


def grouped(path: Path | RemoteObject, options: OpenOptions) -> GroupedFile:
    """The row groups of a file, or of an object in a store.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read as rows.
    """
    parquet = extras.require("pyarrow.parquet", "parquet")

    def opened(**arguments: Any) -> Any:
        # read, not mapped: a failing disk then is an error, not a SIGBUS
        return parquet.ParquetFile(readable(path), memory_map=False, pre_buffer=False, **arguments)

    with naming_file(path, "a Parquet file", "write it again with pyarrow.parquet.write_table"), opened() as file:
        metadata, schema = file.metadata, file.schema_arrow
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
        # a reader is not thread-safe; a new one is cheap, since the footer is already parsed
        with opened(metadata=metadata) as reader:
            column = reader.read_row_group(group, columns=[names[leaf]], use_threads=False).column(names[leaf])
        return _joined([rows_of(chunk, f"column {names[leaf]!r}") for chunk in column.chunks])

    def extents(leaf: int, group: int) -> list[tuple[int, int]]:
        return [extent_of(metadata, group, names[leaf])]

    return GroupedFile(spec, [lengths] * len(names), read, lambda _: digest_of(path), extents)


def extent_of(metadata: Any, group: int, name: str) -> tuple[int, int]:
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
