"""Columns of a dataset as NumPy rows: views of Arrow's memory, also of lists that all have one length."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.formats import extras
from feedline._src.formats.arrow_columns import row_of, rows_of
from feedline._src.formats.grouped_file import Group


def values_of(array: Any, label: str) -> Group:
    """The rows of a `pyarrow.Array` that passes `check_type`. Only booleans and nulls are copied, out of bits.

    Lists of any type are rows of one shape if all of them have the same length, as `datasets.Array2D` has, and as
    tokens have that were padded.

    Args:
      label: names the column in errors.

    Raises:
      ValueError: lists of different lengths.
    """
    types = extras.require("pyarrow", "arrow").types
    kind = array.type
    if _is_extension(kind):
        return values_of(array.storage, label)
    if types.is_fixed_size_list(kind) and not types.is_primitive(kind.value_type):
        inner = values_of(array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size), label)
        return _as_lists(array, inner, kind.list_size)
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return rows_of(array, label)
    ends = np.asarray(array.offsets)
    lengths = np.diff(ends)
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"{label}: the positions of its lists must ascend; the table is damaged, make it again")
    length = int(lengths[0]) if len(lengths) else 0
    if (lengths != length).any():
        raise _different_lengths(label, f"{lengths.min()} to {lengths.max()} values")
    inner = values_of(array.values.slice(int(ends[0]), length * len(array)), label)
    return _as_lists(array, inner, length)


def _as_lists(array: Any, inner: Group, length: int) -> Group:
    """The lists of `array`, all of this length, of which `inner` has the values one after the other."""
    null = np.asarray(array.is_null()) if array.null_count else None
    if inner.null is not None:
        within = np.asarray(inner.null.reshape(len(array), length).any(1))
        null = within if null is None else null | within
    return Group(inner.values.reshape(len(array), length, *inner.values.shape[1:]), null)


def _different_lengths(label: str, found: str) -> ValueError:
    return ValueError(
        f"{label} must have lists of one length, and they have {found}; pad them with dataset.map, or read them "
        "by their offsets with feedline.Ragged (docs/hugging_face.md). If the rows of this dataset were selected "
        "from others, copy them with dataset.flatten_indices(). columns=[...] leaves the column out"
    )


def _is_extension(kind: Any) -> bool:
    """Whether it is a type of `datasets`, such as that of `Array2D`. Arrow's own are of another class."""
    return isinstance(kind, extras.require("pyarrow", "arrow").ExtensionType)


def check_type(kind: Any, label: str) -> None:
    """Refuse values that are neither numbers nor lists of numbers.

    Raises:
      TypeError: the message says what to do in terms of `datasets`.
    """
    types, inner = extras.require("pyarrow", "arrow").types, kind
    while True:
        if _is_extension(inner):
            inner = inner.storage_type
        elif types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
            inner = inner.value_type
        else:
            break
    try:
        row_of(inner, label)
    except TypeError:
        raise TypeError(
            f"{label} must have rows that are numbers, bytes or text, or lists of numbers, got {kind}; "
            f"{_remedy(kind)}, or leave the column out with columns=[...]"
        ) from None


def _remedy(kind: Any) -> str:
    types = extras.require("pyarrow", "arrow").types
    if types.is_date32(kind) or types.is_time32(kind):
        return "cast it: dataset.cast_column(name, datasets.Value('int32'))"
    if types.is_temporal(kind):
        return "cast it: dataset.cast_column(name, datasets.Value('int64')), and see docs/tables.md for its range"
    if types.is_decimal(kind):
        return "cast it: dataset.cast_column(name, datasets.Value('float64'))"
    if types.is_struct(kind):
        return "make columns of its fields: dataset.flatten()"
    return "make numbers of it with dataset.map"


def trees_of(table: Any) -> tuple[list[dict[str, npt.NDArray[Any]]], dict[str, npt.NDArray[np.bool_]]]:
    """The rows of a `pyarrow.Table` by column, in pieces that follow each other.

    Returns:
      The pieces; and for each column with nulls bool[rows of the table], true for rows with a null.

    Raises:
      TypeError: a column has rows that are not numbers.
      ValueError: a column has lists of different lengths.
    """
    trees: list[dict[str, npt.NDArray[Any]]] = []
    nulls: dict[str, npt.NDArray[np.bool_]] = {}
    for field in table.schema:
        check_type(field.type, f"column {field.name!r}")
    start = 0
    for batch in table.to_batches():
        if not batch.num_rows:
            continue
        tree = {}
        for name in table.column_names:
            label = f"column {name!r}"
            tree[name], null = values_of(batch.column(name), label)
            if trees and tree[name].shape[1:] != (first := trees[0][name].shape[1:]):
                raise _different_lengths(label, f"the shapes {list(first)} and {list(tree[name].shape[1:])}")
            if null is not None:
                whole = nulls.setdefault(name, np.zeros(table.num_rows, np.bool_))
                whole[start : start + batch.num_rows] = null
        trees.append(tree)
        start += batch.num_rows
    return trees, nulls
