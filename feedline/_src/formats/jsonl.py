"""JSON lines: files whose lines are JSON objects. Numbers become arrays, and text becomes bytes.

The first line says which fields there are, and what each holds: text, or numbers of one shape. A field of integers
is float64 if a line in the first 64 KiB has a fraction. Other lines may have more fields, which are not read.
"""

from __future__ import annotations

import functools
import json
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.formats.table import Leaf, Records, Scan, check_not_compressed, few

Array = npt.NDArray[Any]
_BLOCK_BYTES = 1 << 20
_START_BYTES = 1 << 16
"""Read to learn the fields; more if no line ends within."""
_BLANK = b" \t\r\n\xef\xbb\xbf"
"""Bytes of which a blank line consists: white space of JSON, and byte order marks."""
_NEWLINE_CRC = zlib.crc32(b"\n")
_DTYPES = {"b": np.dtype(bool), "i": np.dtype(np.int64), "f": np.dtype(np.float64)}


def scan(file: File) -> Scan:
    """Where the lines lie, without blank ones. The header of a line is the line break before it."""
    parts = array("q")

    def add(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        header = np.minimum(begins, 1)
        entries = np.stack([begins - header, header, ends - begins, header * _NEWLINE_CRC], axis=1)
        parts.frombytes(entries.astype(np.int64).tobytes())

    at = begin = 0
    filled = False  # the line that begins at `begin` is not blank so far
    with file.open(sequential=True) as opened:
        while block := opened.read(_BLOCK_BYTES):
            data = np.frombuffer(block, np.uint8)
            visible = ~np.isin(data, np.frombuffer(_BLANK, np.uint8))
            ends = np.flatnonzero(data == ord("\n")) + 1
            if len(ends):
                begins = np.concatenate([[0], ends[:-1]])
                lines = np.logical_or.reduceat(visible[: ends[-1]], begins)
                lines[0] |= filled
                begins[0] = begin - at
                add(at + begins[lines], at + ends[lines])
                begin, filled = at + int(ends[-1]), False
            filled |= bool(visible[max(0, begin - at) :].any())
            at += len(block)
    if filled:
        add(np.array([begin]), np.array([at]))
    return Scan(None, parts)


def open_lines(file: File, options: OpenOptions) -> Records:
    """How lines are read: as arrays if all columns are numbers, else as dicts, or bytes of a single text."""
    lines = _first_lines(file)
    spec = _spec_of(lines, options.chosen(list(lines[0]), file.name), file.name)
    if not any(isinstance(leaf, str) for leaf in spec.values()):
        return Records(scan, unpack=functools.partial(_arrays, spec), spec=spec)
    data_of = functools.partial(_record, spec)
    return Records(scan, data_of=data_of, leaves=spec if len(spec) > 1 else None)


FORMAT = Format("jsonl", (".jsonl", ".ndjson"), takes=frozenset({"columns"}), way="records", open=open_lines)


def _first_lines(file: File) -> list[dict[str, Any]]:
    """The objects of the lines at the start of a file, without those that cannot be read."""
    data = b""
    with file.open() as opened:
        while block := opened.read(max(_START_BYTES, len(data))):
            data += block
            if b"\n" in data.lstrip(_BLANK):
                break
    lines = [line for line in data.split(b"\n") if line.strip(_BLANK)]
    if not lines:
        raise ValueError(
            f"a source must have at least one row, got {file.name} with no lines; check what wrote it"
        )
    check_not_compressed(lines[0], file.name)
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(_object(line))
            if not found[0]:
                raise ValueError("it has no fields")
        except ValueError as error:
            if number == 0:
                raise ValueError(
                    f'each line must be a JSON object, {{"name": value, ...}}, and the first of {file.name}, '
                    f"{line[:60]!r}, is none: {error.__cause__ or error}; write it again, one object a line: "
                    "pandas.read_json(path).to_json(new, orient='records', lines=True)"
                ) from error
            # else a bad row when it is read; or the last one, of which only a part was read
    return found


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. ValueError: it is none."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError(f"it is a JSON {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"each line must be a JSON object, and this one is none: {error}; mend the line"
        ) from error
    return found


def _spec_of(lines: Sequence[dict[str, Any]], columns: Sequence[str], path: str) -> dict[str, Leaf]:
    """What each column is. TypeError lists all columns that are neither text nor numbers."""
    spec: dict[str, Leaf] = {}
    refused = []
    for name in columns:
        try:
            spec[name] = _leaf_of([line[name] for line in lines if line.get(name) is not None])
        except TypeError as error:
            refused.append(f"{name!r} is {error}")
    if refused:
        leave = f", or leave it out: columns=[{few([repr(name) for name in spec], ', ')}]" if spec else ""
        raise TypeError(
            f"each column must be text or numbers of one shape, and {len(refused)} of {len(columns)} of {path} "
            f"are not: {few(refused, '; ')}. Write the file again{leave}"
        )
    return spec


def _leaf_of(values: Sequence[Any]) -> Leaf:
    """What a column is that has these values at the start of the file. TypeError says why it cannot be read."""
    if not values:
        raise TypeError("null in all lines at the start of the file: fill it")
    first = values[0]
    if isinstance(first, str):
        return "bytes"
    if isinstance(first, dict):
        raise TypeError("an object: flatten it, as pandas.json_normalize does")
    found = _as_array([first])
    if found is None or found.size == 0 or not (found.dtype.kind in "bi" or _has_float(first, found)):
        raise TypeError(
            f"{_shown(first)}: write text, or numbers that fit int64 or float64 in lists of one length"
        )
    if isinstance(first, list) and any(isinstance(v, list) and len(v) != len(first) for v in values):
        raise TypeError("a list of different lengths: pad it, or see feedline.Ragged")
    is_float = found.dtype.kind == "i" and any(_has_float(value, _as_array([value])) for value in values)
    return jax.ShapeDtypeStruct(found.shape[1:], _DTYPES["f" if is_float else found.dtype.kind])


def _record(spec: Mapping[str, Leaf], line: bytes) -> Any:
    """The record of a line: a dict, or the bytes of a single column of text."""
    found = [_object(line)]
    record = {name: _column(found, name, leaf)[0] for name, leaf in spec.items()}
    return record if len(spec) > 1 else next(iter(record.values()))


def _arrays(spec: Mapping[str, Leaf], lines: list[bytes]) -> dict[str, Any]:
    """The columns of some lines."""
    found = [_object(line) for line in lines]
    return {name: _column(found, name, leaf) for name, leaf in spec.items()}


def _column(lines: Sequence[dict[str, Any]], name: str, leaf: Leaf) -> Any:
    """The values of a column. Whether one fits does not depend on the other lines."""
    if missing := [line for line in lines if name not in line]:
        raise ValueError(
            f"each line must have the fields of the first, and one of {list(missing[0])} has no {name!r}; mend it"
        )
    values = [line[name] for line in lines]
    if isinstance(leaf, str):
        if all(isinstance(value, str) for value in values):
            try:
                return [value.encode() for value in values]
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"text must be Unicode, and {name!r} is {_shown(values[0])}; mend the line"
                ) from error
    else:
        found = _as_array(values)
        if found is not None and found.shape[1:] == leaf.shape and np.can_cast(found.dtype, leaf.dtype):
            return found.astype(leaf.dtype, copy=False)
    kind = "text" if isinstance(leaf, str) else f"{leaf.dtype}{list(leaf.shape) or ''}"
    raise ValueError(
        f"the field {name!r} must be {kind}, as in the first line, and is {_shown(values[0])}; mend the line"
    )


def _as_array(values: Sequence[Any]) -> Array | None:
    """Values of JSON as an array; None if they are no numbers, do not fit float64, or differ in shape.

    Integers beyond int64 become uint64 or, rounded, float64.
    """
    try:
        found = np.asarray(values)
        if found.dtype == object and all(isinstance(value, int | float) for value in found.flat):
            found = found.astype(np.float64)
    except (ValueError, OverflowError):
        return None
    return found if found.dtype.kind in "biuf" else None


def _has_float(value: Any, found: Array | None) -> bool:
    """Whether a number in the value is a float, and not only its array is."""
    if found is None or found.dtype.kind != "f":
        return False
    return any(isinstance(each, float) for each in np.asarray([value], object).flat)


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.60}"
