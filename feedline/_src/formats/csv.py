"""CSV files, which are read into memory when they are opened: rows of text cannot be found without reading all."""

from __future__ import annotations

from typing import Any

import numpy as np

from feedline._src.files.file import File
from feedline._src.formats.arrow_columns import column_of, naming_file, spec_of
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, require, suffix_of
from feedline._src.formats.table import Column, Grouped

_BLOCK_BYTES = (1 << 31) - 1
"""pyarrow takes types from the first block, so that all of a file is one, up to the largest that it can parse."""

_ROUNDED = 2.0**53
"""From here on, float64 does not hold all integers."""


def open_file(file: File, options: OpenOptions) -> Grouped:
    """The rows of a file, as one group in memory. Its first line has the names of the columns.

    Raises:
      ValueError, TypeError: it cannot be read as rows, or takes more than `cache_bytes`.
    """
    pyarrow = require("pyarrow", "arrow")
    _check_size("bytes of text", file.size, options, file.name)
    data = file.read(np.array([0]), np.array([file.size]))[0]
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(
            f"a CSV file must be UTF-8, and {file.name} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
        )
    if data and not data.endswith((b"\n", b"\r")):
        raise ValueError(
            f"a CSV file must end with a line break, since one without may be truncated, and {file.name} does "
            "not; if it is whole, append one, and else check what wrote it"
        )
    table = _table(data, file.name)
    for i, column in enumerate(table.columns):
        if pyarrow.types.is_null(column.type):  # no value at all: empty text
            empty = pyarrow.repeat(pyarrow.scalar(b""), table.num_rows)
            table = table.set_column(i, table.column_names[i], empty)
    if table.num_rows == 0:
        raise ValueError(f"a source must have at least one row, got {file.name} with none; check what wrote it")
    spec = spec_of(table.schema, options, file.name)
    _check_integers(data, table.select(list(spec)), file.name)
    names = sorted(spec)
    columns = [_column_of(table.column(name), name) for name in names]
    held = sum(column.nbytes for column in columns)
    _check_size("bytes in memory", held, options, file.name)

    def read(leaf: int, group: int) -> Column:
        return columns[leaf]

    nulls = {leaf: int(column.null.sum()) for leaf, column in enumerate(columns) if column.null is not None}
    return Grouped(spec, [[table.num_rows]] * len(names), read, in_place=True, nulls=nulls, held_bytes=held)


FORMAT = Format(
    "csv", (".csv", ".tsv"), takes=frozenset({"columns", "cache_bytes"}), extra="arrow", open=open_file
)


def _table(data: bytes, path: str, **conversions: Any) -> Any:
    """The `pyarrow.Table` of a file with these bytes; `conversions`: of pyarrow's `ConvertOptions`."""
    pyarrow, csv = require("pyarrow", "arrow"), require("pyarrow.csv", "arrow")
    nulls = [text for text in csv.ConvertOptions().null_values if text.lstrip("-").lower() != "nan"]  # a number
    with naming_file(path, "a CSV file", "correct the line, or write it again"):
        return csv.read_csv(
            pyarrow.BufferReader(data),
            read_options=csv.ReadOptions(block_size=max(1, min(len(data), _BLOCK_BYTES))),
            parse_options=csv.ParseOptions(
                delimiter="\t" if suffix_of(path) == ".tsv" else ",", newlines_in_values=True
            ),
            convert_options=csv.ConvertOptions(null_values=nulls, **conversions),
        )


def _check_integers(data: bytes, table: Any, path: str) -> None:
    """Refuse columns of integers that float64 rounds, which pyarrow makes of those beyond int64.

    Raises:
      ValueError: there is one.
    """
    pyarrow, compute = require("pyarrow", "arrow"), require("pyarrow.compute", "arrow")
    for name in table.column_names:
        if not pyarrow.types.is_float64(table.column(name).type):
            continue
        values = table.column(name).to_numpy()
        sizes = np.where(np.isfinite(values), np.abs(values), 0)
        if not sizes.max(initial=0) >= _ROUNDED:
            continue
        as_text = {name: pyarrow.large_string()}
        read = _table(data, path, include_columns=[name], column_types=as_text, strings_can_be_null=True)
        text = read.column(name)
        if not compute.any(compute.match_substring_regex(text, "[.eE]")).as_py():
            rest = [other for other in table.column_names if other != name]
            raise ValueError(
                f"a column of integers must fit int64, and {name!r} of {path} has {text[int(sizes.argmax())]}, "
                "which float64 would round; write the file as Parquet once, from what pyarrow.csv.read_csv gives "
                f"with ConvertOptions(column_types={{{name!r}: pyarrow.uint64()}})"
                + (f", or leave the column out: columns={rest}" if rest else "")
            )


def _column_of(column: Any, name: str) -> Column:
    pyarrow = require("pyarrow", "arrow")
    types = pyarrow.types
    if types.is_string(column.type) or types.is_binary(column.type):  # 64-bit positions: it may have over 2 GiB
        column = column.cast(pyarrow.large_binary())
    return column_of(column.combine_chunks(), f"column {name!r}").copied()


def _check_size(what: str, found: int, options: OpenOptions, path: str) -> None:
    if found > options.cache_bytes:
        raise ValueError(
            f"a CSV file is read into memory, so it must fit into cache_bytes={options.cache_bytes}, and {path} "
            f"has {found} {what}; raise cache_bytes, or write it as Parquet once: "
            "pyarrow.dataset.write_dataset(pyarrow.csv.open_csv(path), folder, format='parquet')"
        )
