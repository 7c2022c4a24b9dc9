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
from feedline._src.formats.table import Records, Scan, check_not_compressed

Array = npt.NDArray[Any]
Numbers = jax.ShapeDtypeStruct
_BLOCK_BYTES = 1 << 20
_START_BYTES = 1 << 16
"""Read to learn the fields; more if no line ends within."""
_MOST_SHOWN = 20
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
    """How lines are read: as arrays if all columns are numbers, else as dicts; a single column of text as bytes.

    Raises:
      ValueError: the first line is no JSON object, or has no fields or no such column.
      TypeError: a column is neither text nor numbers of one shape.
    """
    lines = _first_lines(file)
    if not lines[0]:
        raise ValueError(f"the first line names the fields, and that of {file.name} has none; write it again")
    columns = options.chosen(list(lines[0]), file.name)
    kinds = _kinds_of(lines, columns, file.name)
    numbers = {name: kind for name, kind in kinds.items() if kind is not None}
    if len(numbers) == len(kinds):
        return Records(scan, unpack=functools.partial(_arrays, numbers), spec=numbers)
    return Records(
        scan,
        data_of=functools.partial(_record, kinds),
        leaves={name: "bytes" if kind is None else kind for name, kind in kinds.items()}
        if len(kinds) > 1
        else None,
    )


FORMAT = Format("jsonl", (".jsonl", ".ndjson"), takes=frozenset({"columns"}), way="records", open=open_lines)


def _first_lines(file: File) -> list[dict[str, Any]]:
    """The objects of the lines at the start of a file, without those that cannot be read.

    Raises:
      ValueError: the first is no object, or there are no lines.
    """
    blocks: list[bytes] = []
    filled = False
    with file.open() as opened:
        while block := opened.read(_START_BYTES):
            blocks.append(block)
            if b"\n" in (block if filled else block.lstrip(_BLANK)):
                break
            filled = filled or bool(block.strip(_BLANK))
    lines = [line for line in b"".join(blocks).split(b"\n") if line.strip(_BLANK)]
    if not lines:
        raise ValueError(
            f"a source must have at least one row, got {file.name} with no lines; check what wrote it"
        )
    check_not_compressed(lines[0], file.name)
    found = []
    try:
        found.append(_object(lines[0]))
    except ValueError as error:
        raise ValueError(_not_lines(file.name, lines[0], error)) from error
    for line in lines[1:]:
        try:
            found.append(_object(line))
        except ValueError:
            continue  # a bad row when it is read; or the last one, of which only a part was read
    return found


def _not_lines(path: str, line: bytes, error: ValueError) -> str:
    return (
        f'each line must be a JSON object, {{"name": value, ...}}, and the first of {path}, {line[:60]!r}, is '
        f"none: {error}; write it again, one object a line: pandas.read_json(path).to_json(new, orient='records', "
        "lines=True)"
    )


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. ValueError: it is none."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"it is a JSON {type(found).__name__}")
    return found


def _line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line that is read as a row."""
    try:
        return _object(line)
    except ValueError as error:
        raise ValueError(
            f"each line must be a JSON object, and this one is none: {error}; mend the line"
        ) from error


def _kinds_of(lines: Sequence[dict[str, Any]], columns: Sequence[str], path: str) -> dict[str, Numbers | None]:
    """Shape and dtype of each column; None: it is text. TypeError lists all columns that are neither."""
    kinds: dict[str, Numbers | None] = {}
    refused = []
    for name in columns:
        try:
            kinds[name] = _kind_of([line[name] for line in lines if line.get(name) is not None])
        except TypeError as error:
            refused.append(f"{name!r} is {error}")
    if refused:
        more = f"; … {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
        leave = f", or leave it out: columns={list(kinds)[:_MOST_SHOWN]}" if kinds else ""
        count = f"{len(refused)} of {len(columns)}"
        raise TypeError(
            f"each column must be text or numbers of one shape, and {count} of {path} are not: "
            f"{'; '.join(refused[:_MOST_SHOWN])}{more}. Write the file again{leave}"
        )
    return kinds


def _kind_of(values: Sequence[Any]) -> Numbers | None:
    """What a column holds that has these values at the start of the file. TypeError says why it cannot be read."""
    if not values:
        raise TypeError("null in all lines at the start of the file: fill it")
    first = values[0]
    if isinstance(first, str):
        return None
    if isinstance(first, dict):
        raise TypeError("an object: flatten it, as pandas.json_normalize does")
    found = _as_array([first])
    if found is None or found.size == 0 or not (found.dtype.kind in "bi" or _has_float([first], found)):
        raise TypeError(
            f"{_shown(first)}: write text, or numbers that fit int64 or float64 in lists of one length"
        )
    if isinstance(first, list) and any(isinstance(v, list) and len(v) != len(first) for v in values):
        raise TypeError("a list of different lengths: pad it, or see feedline.Ragged")
    is_float = found.dtype.kind == "i" and any(_has_float([value], _as_array([value])) for value in values)
    return Numbers(found.shape[1:], _DTYPES["f" if is_float else found.dtype.kind])


def _record(kinds: Mapping[str, Numbers | None], line: bytes) -> Any:
    """The record of a line: a dict, or the bytes of a single column of text."""
    found = _line(line)
    record = {
        name: _text(found, name) if kind is None else _column([found], name, kind)[0]
        for name, kind in kinds.items()
    }
    return record if len(kinds) > 1 else next(iter(record.values()))


def _arrays(kinds: Mapping[str, Numbers], lines: list[bytes]) -> dict[str, Array]:
    """The columns of some lines."""
    found = [_line(line) for line in lines]
    return {name: _column(found, name, kind) for name, kind in kinds.items()}


def _column(lines: Sequence[dict[str, Any]], name: str, kind: Numbers) -> Array:
    """The numbers of a column. Whether a value fits does not depend on the other lines."""
    values = [_value(line, name) for line in lines]
    found = _as_array(values)
    if found is None or found.shape[1:] != kind.shape or not np.can_cast(found.dtype, kind.dtype):
        raise _other(name, f"{kind.dtype}{list(kind.shape) or ''}", values[0])
    return found.astype(kind.dtype, copy=False)


def _text(line: dict[str, Any], name: str) -> bytes:
    value = _value(line, name)
    if not isinstance(value, str):
        raise _other(name, "text", value)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must be Unicode, and the field {name!r} has half of a surrogate pair, {_shown(value)}; "
            "mend the line"
        ) from error


def _value(line: dict[str, Any], name: str) -> Any:
    if name not in line:
        raise ValueError(f"each line must have the fields of the first, and it has no {name!r}; mend the line")
    return line[name]


def _other(name: str, kind: str, value: Any) -> ValueError:
    return ValueError(
        f"the field {name!r} must be {kind}, as in the first line, and is {_shown(value)}; mend the line"
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


def _has_float(values: Sequence[Any], found: Array | None) -> bool:
    """Whether one of the values is a float, and not only their array is."""
    if found is None or found.dtype.kind != "f":
        return False
    return any(isinstance(value, float) for value in np.asarray(values, object).flat)


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.60}"
