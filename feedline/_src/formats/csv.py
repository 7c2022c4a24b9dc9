"""CSV files. They are read into memory when they are opened, because only a complete scan locates their rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from feedline._src.files.file import File
from feedline._src.formats.arrow import column_of, is_bytes, spec_of
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, Library, suffix_of
from feedline._src.formats.table import Column, Grouped, naming_file

_BLOCK_BYTES = (1 << 31) - 1
"""The largest block that pyarrow can parse.

pyarrow infers types from the first block, so a file is one block if it fits.
"""
_ROUNDED = 2.0**53
"""From this number on, float64 cannot represent all integers."""
pyarrow: Any = Library("pyarrow", "arrow")
csv: Any = Library("pyarrow.csv", "arrow")


def open_file(file: File, options: OpenOptions) -> Grouped:
    """Read the rows of a file into memory, as one group. The first line has the names of the columns."""
    _check_size("bytes of text", file.size, options, file.name)
    data = file.read(np.array([0]), np.array([file.size]))[0]
    table = _table(data, file.name)
    if data and not data.endswith((b"\n", b"\r")):
        raise ValueError(
            f"a CSV file must end with a line break, since otherwise it may be truncated, and {file.name} does "
            "not; if it is complete, append one; otherwise, check what wrote it"
        )
    for i, column in enumerate(table.columns):
        if pyarrow.types.is_null(column.type):  # the column has no values: read it as empty text
            empty = pyarrow.repeat(pyarrow.scalar(b""), table.num_rows)
            table = table.set_column(i, table.column_names[i], empty)
    spec = spec_of(table.schema, options, file.name)
    names, columns = sorted(spec), []
    for name in names:
        column = table.column(name)
        if is_bytes(column.type):  # 64-bit offsets, since the text may exceed 2 GiB
            column = column.cast(pyarrow.large_binary())
        columns.append(column_of(column.combine_chunks()).copied())
        _check_integers(name, columns[-1], file.name)
    held = sum(column.nbytes for column in columns)
    _check_size("bytes in memory", held, options, file.name)
    nulls = {leaf: column.nulls for leaf, column in enumerate(columns)}
    lengths = [[table.num_rows]] * len(names)
    return Grouped(spec, lengths, lambda leaf, group: columns[leaf], in_place=True, nulls=nulls, held_bytes=held)


FORMAT = Format(
    "csv", (".csv", ".tsv"), takes=frozenset({"columns", "cache_bytes"}), extra="arrow", open=open_file
)


def _table(data: bytes, path: str) -> Any:
    """Parse the bytes of a file into a `pyarrow.Table`."""
    nulls = [text for text in csv.ConvertOptions().null_values if text.lstrip("-").lower() != "nan"]  # except NaN
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    with naming_file(path, "a CSV file", "correct the line, or write it again as UTF-8"):
        table = csv.read_csv(
            pyarrow.BufferReader(data),
            read_options=csv.ReadOptions(block_size=max(1, min(len(data), _BLOCK_BYTES))),
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(null_values=nulls),
        )
        _ = table.column_names  # decodes the names here, so that an error names the file
        return table


def _check_integers(name: str, column: Column, path: str) -> None:
    """Raise ValueError for a column that may hold integers beyond int64, which pyarrow rounds to floats."""
    if column.values.dtype != np.float64:
        return
    values = column.values[np.isfinite(column.values)]
    if np.abs(values).max(initial=0) >= _ROUNDED and (values == np.floor(values)).all():
        raise ValueError(
            f"a column of integers must fit int64, and {name!r} of {path} has integers that float64 would round, "
            f"such as {values[np.abs(values).argmax()]:.0f}; leave it out with columns=[...], or convert the file "
            f"to Parquet: read it with pyarrow.csv.read_csv and ConvertOptions(column_types={{{name!r}: "
            "pyarrow.uint64()}), or pyarrow.float64() if its values are not integers"
        )


def _check_size(what: str, found: int, options: OpenOptions, path: str) -> None:
    if found > options.cache_bytes:
        raise ValueError(
            f"a CSV file is read into memory, so it must fit into cache_bytes={options.cache_bytes}, and {path} "
            f"has {found} {what}; raise cache_bytes, or convert it to Parquet: "
            "pyarrow.dataset.write_dataset(pyarrow.csv.open_csv(path), folder, format='parquet')"
        )
