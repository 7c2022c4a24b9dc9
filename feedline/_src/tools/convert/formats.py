"""The formats that rows are converted to: what each can hold, and how its files are opened again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from feedline._src.tools.convert.columns import NAMELESS, Kind, Kinds

FormatName = Literal["array_record", "npy", "parquet", "zarr"]
_OF_NUMPY = "biufc"


class Rule(NamedTuple):
    """What a format cannot hold, as a phrase for an error, and a change that works."""

    found: str
    change: str


def default_format(kinds: Kinds) -> FormatName:
    """The format that is read fastest: npy for numbers, and array_record for bytes where it can hold them."""
    if all(kind.dtype is not None for kind in kinds.values()):
        return "npy" if _refusal("npy", kinds) is None else "array_record"
    return "array_record" if NAMELESS in kinds else "parquet"


def check_format(name: str, kinds: Kinds) -> FormatName:
    """The format with this name.

    Raises:
      ValueError: there is no such format.
      TypeError: it cannot hold these rows.
    """
    if name not in get_args(FormatName):
        raise ValueError(f"format must be one of {', '.join(get_args(FormatName))}, got {name!r}")
    if (rule := _refusal(name, kinds)) is not None:
        raise TypeError(f"{name} cannot hold {rule.found}; {rule.change}")
    return name  # type: ignore[return-value]


def _refusal(name: str, kinds: Kinds) -> Rule | None:
    """Why a format cannot hold rows of these kinds; None if it can."""
    encoded = [repr(column) if column else "rows" for column, kind in kinds.items() if kind.dtype is None]
    if encoded and name in ("npy", "zarr"):
        return Rule(
            f"bytes of any length, and {encoded[0]} {'are' if encoded[0] == 'rows' else 'holds'} bytes",
            "choose array_record or parquet, or convert feedline.decoded(source, decode, spec), of arrays",
        )
    if encoded and name == "array_record" and len(kinds) > 1:
        return Rule(
            f"records of several fields, and these have {', '.join(kinds)}",
            "choose parquet, which keeps the fields apart",
        )
    inside = next((column for column, kind in kinds.items() if kind.nested), None)
    if inside is not None and name in ("parquet", "zarr"):
        return Rule(f"dicts in a row, and {inside!r} lies in one", "choose npy or array_record")
    if name == "parquet" and not encoded:
        return _refused_by_parquet(kinds)
    if name == "npy":
        lost = next((kind.dtype.name for kind in kinds.values() if kind.dtype and not _is_numpys(kind)), None)
        if lost is not None:
            return Rule(f"{lost}, whose name a .npy file loses", "choose zarr or array_record")
    if name == "zarr":
        bad = next((c for c in kinds if "/" in c or c.startswith((".", "__"))), None)
        if bad is not None:
            return Rule(f"a leaf with the name {bad!r}, which is no name of an array", "rename it, or choose npy")
    return None


def _refused_by_parquet(kinds: Kinds) -> Rule | None:
    if NAMELESS in kinds:
        return Rule(
            "rows that are one array without a name, since its columns have names",
            "choose npy, zarr or array_record, or name it: feedline.open_source(..., columns=['x'])",
        )
    for column, kind in kinds.items():
        if kind.dtype is not None and (kind.dtype.kind not in "biuf" or not _is_numpys(kind)):
            return Rule(f"{kind.dtype}, and {column!r} is of it", "choose zarr or array_record")
        if 0 in kind.shape:
            return Rule(f"empty values, and {column!r} has the shape {kind.shape}", "leave it out")
    return None


def _is_numpys(kind: Kind) -> bool:
    """Whether NumPy itself has the dtype. It does not have bfloat16 and float8."""
    return kind.dtype is None or kind.dtype.kind in _OF_NUMPY


def row_dtype(kinds: Kinds) -> np.dtype[Any]:
    """The dtype of a whole row of numbers: structured, if its leaves have names."""
    row: np.dtype[Any] = np.dtype(_described(kinds, lambda kind: kind.dtype))
    return row


def path_of(name: str, kind: Kind) -> list[str]:
    """The keys under which a leaf lies in the row."""
    return name.split("/") if kind.nested else [name]


def _described(kinds: Kinds, of: Callable[[Kind], Any]) -> Any:
    """What `numpy.dtype` takes for a whole row. `of` gives the dtype of a leaf, or its name."""
    if NAMELESS in kinds:
        return of(kinds[NAMELESS]), kinds[NAMELESS].shape
    fields: list[Any] = []
    for name, kind in kinds.items():
        *groups, last = path_of(name, kind)
        inside = fields
        for group in groups:
            if not inside or inside[-1][0] != group:
                inside.append((group, []))
            inside = inside[-1][1]
        inside.append((last, of(kind), kind.shape))
    return fields


def open_options(name: FormatName, kinds: Kinds) -> dict[str, Any]:
    """The options with which `feedline.open_source` reads the files."""
    if name == "array_record" and all(kind.dtype is not None for kind in kinds.values()):
        return {"dtype": row_dtype(kinds)}
    return {}


def open_line(pattern: str, name: FormatName, kinds: Kinds) -> str:
    """The Python expression that opens the files.

    Example:
      >>> open_line("out/*.array_record", "array_record", {"x": Kind(np.dtype(np.uint8), (3,))})
      "feedline.open_source('out/*.array_record', dtype=np.dtype([('x', 'uint8', (3,))]))"
    """
    if not open_options(name, kinds):
        return f"feedline.open_source({pattern!r})"
    row = _described(kinds, lambda kind: kind.dtype.name if kind.dtype else "")
    return f"feedline.open_source({pattern!r}, dtype=np.dtype({row!r}))"
