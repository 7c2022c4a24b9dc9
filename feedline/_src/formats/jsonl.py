"""JSON lines: files whose lines are JSON objects. Numbers become arrays, and text becomes bytes.

The first line determines the fields, and whether each holds text or numbers of one shape. Integers in this line
become float64 if the field has a fraction in the first 64 KiB. Fields that the first line lacks are ignored.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.record_index import IndexedFile, Scan
from feedline._src.formats.registry import Format
from feedline._src.formats.table import Grouped, Leaf, by_rows, described, few, naming_file
from feedline._src.rows.shards import Indices

Array = npt.NDArray[Any]
_START_BYTES = 1 << 16
"""The number of bytes from which the dtypes are determined."""
_BLANK = b" \t\r\n\xef\xbb\xbf"
"""The bytes of blank lines: white space of JSON, and byte order marks."""
_NEWLINE_CRC = zlib.crc32(b"\n")


def scan(file: File) -> Scan:
    """Locate the lines, except blank ones. The line break before a line serves as its header."""
    parts = array("q")
    at = 0
    with file.open(sequential=True) as opened:
        for line in opened:
            if line.strip(_BLANK):
                header = 1 if at else 0
                parts.extend((at - header, header, len(line), header * _NEWLINE_CRC))
            at += len(line)
    return Scan(None, parts)


def open_first(first: File, options: OpenOptions) -> Callable[..., Grouped]:
    """Return the function that opens each file of a source. All lines must have the fields of the first line."""
    lines = _first_lines(first)
    spec = _spec_of(lines, options.chosen(list(lines[0]), first.name), first.name)
    return functools.partial(_open, spec)


FORMAT = Format("jsonl", (".jsonl", ".ndjson"), takes=frozenset({"columns"}), open_first=open_first)


def _open(spec: dict[str, Leaf], file: File, options: OpenOptions) -> Grouped:
    """The lines of a file."""
    indexed = IndexedFile(file, "jsonl", scan)
    names = sorted(spec)  # the order of a dict's leaves in JAX

    def read_rows(leaves: Sequence[int], rows: Indices) -> list[Any]:
        lines = list(map(_object, indexed.read(rows)))
        return [_column(lines, names[leaf], spec[names[leaf]]) for leaf in leaves]

    return by_rows(spec, indexed.count, read_rows, row_extents=indexed.extents)


def _first_lines(file: File) -> list[dict[str, Any]]:
    """Parse the first lines of a file. All but the very first may be bad rows, which are skipped."""
    with file.open() as opened:
        lines = [line for line in opened.readlines(_START_BYTES) if line.strip(_BLANK)]
    if not lines:
        raise ValueError(
            f"a source must have at least one row, got {file.name} with no lines in its first {_START_BYTES} "
            "bytes; check what wrote it"
        )
    remedy = "write it again, one object a line: pandas.read_json(path).to_json(new, orient='records', lines=True)"
    with naming_file(file.name, "JSON lines", remedy):
        found = [_object(lines[0])]
    for line in lines[1:]:
        with contextlib.suppress(ValueError):
            found.append(_object(line))
    return found


def _object(line: bytes) -> dict[str, Any]:
    """Parse a line. Raises ValueError if it is not a JSON object with fields."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
        if not isinstance(found, dict) or not found:
            raise ValueError(f"it is a JSON {type(found).__name__}" if found else "it has no fields")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"each line must be a JSON object, and {line.strip()[:60]!r} is not: {error}; correct the line"
        ) from error
    return found


def _spec_of(lines: Sequence[dict[str, Any]], columns: Sequence[str], path: str) -> dict[str, Leaf]:
    """The leaf of each column. Raises a TypeError that lists all columns that are neither text nor numbers."""
    found = {name: _leaf_of([line[name] for line in lines if line.get(name) is not None]) for name in columns}
    spec = {name: leaf for name, leaf in found.items() if leaf is not None}
    if len(spec) < len(found):
        refused = [f"{name!r} is {_shown(lines[0][name])}" for name, leaf in found.items() if leaf is None]
        leave = f", or leave it out: columns=[{few([repr(name) for name in spec], ', ')}]" if spec else ""
        raise TypeError(
            "each column must be text, or numbers that fit int64 or float64, alone or in lists of one length, and "
            f"{len(refused)} of {len(columns)} of {path} are not: {few(refused, '; ')}. Write the file again, "
            f"without nulls and with the fields of objects as columns (pandas.json_normalize){leave}"
        )
    return spec


def _leaf_of(values: Sequence[Any]) -> Leaf | None:
    """Return the leaf of a column with these values; None if the first value is neither text nor numbers."""
    if not values:
        return None
    if isinstance(values[0], str):
        return "bytes"
    first = np.array(values[0], object)
    types = set(map(type, first.ravel()))
    if types <= {int, float} and any(float in map(type, np.array(value, object).ravel()) for value in values):
        dtype: np.dtype[Any] = np.dtype(np.float64)
    else:
        dtype = np.dtype(bool if types == {bool} else np.int64)
    leaf = jax.ShapeDtypeStruct(first.shape, dtype)
    return leaf if types and _fitting(values[:1], leaf) is not None else None


def _column(lines: Sequence[dict[str, Any]], name: str, leaf: Leaf) -> Any:
    """The values of a column. Whether a value fits does not depend on the other lines."""
    if missing := [line for line in lines if name not in line]:
        raise ValueError(
            f"each line must have the fields of the first, but one with the fields {list(missing[0])} has no "
            f"{name!r}; fix it"
        )
    values = [line[name] for line in lines]
    found: Any = None
    if not isinstance(leaf, str):
        found = _fitting(values, leaf)
    elif all(isinstance(value, str) for value in values):
        found = [value.encode() for value in values]
    if found is None:
        kind = "text" if isinstance(leaf, str) else described(leaf)
        raise ValueError(
            f"the field {name!r} must be {kind}, as in the first line, and is {_shown(values[0])}; correct the "
            "line, or pad lists to one length (for rows of different lengths, see docs/sources.md)"
        )
    return found


def _fitting(values: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> Array | None:
    """Convert JSON values to an array of the leaf's dtype; None if a value has another shape, or does not fit.

    NumPy converts integers beyond int64 to uint64 or objects, which only a float64 field accepts.
    """
    try:
        found = np.asarray(values)
        if found.dtype == object and all(isinstance(value, int | float) for value in found.ravel()):
            found = found.astype(np.float64)
    except (ValueError, OverflowError):
        return None
    fits = found.dtype.kind in "biuf" and found.shape[1:] == leaf.shape and np.can_cast(found.dtype, leaf.dtype)
    return found.astype(leaf.dtype, copy=False) if fits else None


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.60}"
