"""Parquet files as groups of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from feedline._src.files.file import File
from feedline._src.formats.arrow import column_of, is_a, readable, spec_of
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, Library
from feedline._src.formats.table import Column, Grouped, check_memory, naming_file

parquet: Any = Library("pyarrow.parquet", "parquet")
pyarrow: Any = Library("pyarrow", "parquet")


def open_file(file: File, options: OpenOptions) -> Grouped:
    """The row groups of a file."""
    open_footer = parquet.ParquetFile  # first, so that an ImportError names the extra "parquet"
    remedy = "write it again with pyarrow.parquet.write_table"
    with naming_file(file.name, "a Parquet file", remedy), readable(file) as source:
        reader = open_footer(source, pre_buffer=False)
        metadata, schema = reader.metadata, _without_views(reader.schema_arrow)
    spec = spec_of(schema, options, file.name)
    names = sorted(spec)
    chunks = _chunks_of(metadata, schema.names)
    with naming_file(file.name, "a Parquet file", remedy):
        nulls = {leaf: _nulls_in(metadata, chunks[name]) for leaf, name in enumerate(names)}
    lengths = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    for name, row in spec.items():
        row_bytes = 0 if isinstance(row, str) else math.prod(row.shape) * row.dtype.itemsize
        check_memory(file.name, f"column {name!r} of a row group", max(lengths, default=0) * row_bytes)

    def read(leaf: int, group: int) -> Column:
        name = names[leaf]
        # a reader is not thread-safe; a new one is cheap, since the footer is already parsed
        with readable(file) as source:
            found = parquet.ParquetFile(source, metadata=metadata, pre_buffer=False).read_row_group(
                group, columns=[name], use_threads=False
            )
        found.validate()  # invalid lengths would make pyarrow abort the process
        column = found.column(name)
        if isinstance(spec[name], str):  # 64-bit offsets, since the joined chunks may exceed 2 GiB
            column = column.cast(pyarrow.large_binary())
        # combine_chunks would copy even a single chunk
        return column_of(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())

    return Grouped(
        spec,
        [lengths] * len(names),
        read,
        extents=lambda leaf, group: [_extent_of(metadata, group, chunks[names[leaf]])],
        nulls=nulls,
    )


FORMAT = Format(
    "parquet",
    (".parquet",),
    takes=frozenset({"columns", "cache_bytes"}),
    extra="parquet",
    open=open_file,
    tail_bytes=1 << 16,  # what pyarrow reads first, to find the footer
)


def _without_views(schema: Any) -> Any:
    """Replace views in a schema by bytes. Parquet stores bytes; a view is only the type preferred in memory."""
    return pyarrow.schema(
        one.with_type(pyarrow.large_binary()) if is_a(one.type, "binary_view", "string_view") else one
        for one in schema
    )


def _chunks_of(metadata: Any, names: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of each column's chunks in a row group. A nested column may have several chunks.

    `names` are all columns of the file. If "a" and "a.b" are columns, "a.b.list.element" is a chunk of "a.b".
    """
    chunks: dict[str, list[int]] = {name: [] for name in names}
    for i in range(metadata.num_columns):
        path = metadata.schema.column(i).path
        while path and path not in chunks:
            path = path.rpartition(".")[0]
        chunks.setdefault(path, []).append(i)
    return chunks


def _extent_of(metadata: Any, group: int, chunks: Sequence[int]) -> tuple[int, int]:
    """Return the offset and length of a column's bytes in a row group."""
    found = [metadata.row_group(group).column(i) for i in chunks]
    first = min(min(each.dictionary_page_offset or each.data_page_offset, each.data_page_offset) for each in found)
    return first, sum(each.total_compressed_size for each in found)


def _nulls_in(metadata: Any, chunks: Sequence[int]) -> int:
    """Return the footer's number of nulls in a column. Raises ValueError if the footer contradicts itself."""
    optional = [i for i in chunks if metadata.schema.column(i).max_definition_level]
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)] if optional else []
    count = 0
    for i in optional:
        kind = metadata.schema.column(i).physical_type
        for chunk in (group.column(i) for group in groups):
            if chunk.physical_type != kind:  # pyarrow would end the process
                raise ValueError(f"a chunk of {chunk.path_in_schema!r} is {chunk.physical_type}, and not {kind}")
            if chunk.statistics is not None and chunk.statistics.has_null_count:
                count += chunk.statistics.null_count
    return count
