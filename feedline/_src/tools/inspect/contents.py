"""The source that is described: how many rows, of which form, and the first of them."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import grain
import jax
import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.loader.form import Transform, transformed_spec
from feedline._src.rows.row_source import RowSource, is_columnar
from feedline._src.rows.spec import Array, Leaf, RowSpec
from feedline._src.sources.lanes import FirstItem, Lanes
from feedline._src.sources.mixture import epoch_rows
from feedline._src.sources.open_source import as_source

_ROWS_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a source holds, as plain values.

    Attributes:
      rows: of an epoch; None: nobody knows before the end of a stream, or a dataset or mixture has no end.
      lanes: of a stream; 0: rows with random access.
      spec: of a row in the source.
      out: of a row after the transform; without one the same as `spec`.
      transformed: whether there is a transform.
      first: each leaf of the first rows, in the source's dtypes, with the rows along the first axis.
      reads_columns: whether the source can read some columns of a leaf alone.
    """

    rows: int | None
    lanes: int
    spec: RowSpec
    out: RowSpec
    transformed: bool
    first: list[Array]
    reads_columns: bool


def contents_of(source: Any, transform: Transform | None = None) -> Contents:
    """Open a source, read its first rows, and close it if it was opened here.

    Args:
      source: as `feedline.Feed` takes it.
      transform: of the feed.

    Raises:
      ValueError, TypeError, OSError: it is no source, there is no such file, or it has no rows.
      FeedError: its first rows cannot be read.

    Example:
      >>> contents = contents_of({"x": np.arange(10, dtype=np.int16)})
      >>> contents.rows, contents.first[0].tolist()
      (10, [0, 1, 2])
    """
    opened = as_source(source)
    if isinstance(opened, grain.IterDataset | Lanes):
        return _stream(Lanes.of(opened), transform)
    try:
        return _random_access(opened, transform)
    finally:
        if opened is not source:
            opened.close()


def _random_access(source: RowSource, transform: Transform | None) -> Contents:
    rows = epoch_rows(source)
    if rows < 1:
        raise ValueError(
            f"a source must have at least one row, {type(source).__name__} has {rows}; check what wrote it"
        )
    spec = RowSpec.of(source.spec)
    first = _empty(spec, min(len(source), _ROWS_SHOWN))
    try:
        source.read(np.arange(len(first[0]), dtype=np.int64), spec.tree(first))
    except FeedError:
        raise
    except Exception as error:
        raise RowError(
            f"the first rows are read to show them, and {type(source).__name__} failed with "
            f"{type(error).__name__}: {error}",
            stage="read",
        ) from error
    out = _out(spec, first, transform)
    endless = rows == sys.maxsize  # what Grain's repeat() returns
    return Contents(None if endless else rows, 0, spec, out, transform is not None, first, is_columnar(source))


def _stream(lanes: Lanes, transform: Transform | None) -> Contents:
    item = FirstItem(lanes)
    first = _empty(item.spec, 1)
    item.read(item.spec.tree(first))
    out = _out(item.spec, first, transform)
    return Contents(None, lanes.count, item.spec, out, transform is not None, first, reads_columns=False)


def _out(spec: RowSpec, first: list[Array], transform: Transform | None) -> RowSpec:
    if transform is None:
        return spec
    return transformed_spec(transform, spec, [leaf[:1].copy() for leaf in first])


def _empty(spec: RowSpec, rows: int) -> list[Array]:
    return [np.empty((rows, *leaf.shape), leaf.dtype) for leaf in spec.leaves]


def row_bytes(spec: RowSpec) -> int:
    """Bytes of a row as the source has it."""
    return sum(map(leaf_bytes, spec.leaves))


def leaf_bytes(leaf: Leaf) -> int:
    """Bytes of a leaf of one row as the source has it."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def placed_tree(contents: Contents) -> Any:
    """The tree of a row as it is placed: `jax.ShapeDtypeStruct`s in JAX's dtypes."""
    return contents.out.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.placed_dtype) for leaf in contents.out.leaves])


def shown(values: Array) -> str:
    """The values of one leaf of one row in a few characters: the values if they are few, else their range.

    Example:
      >>> shown(np.array([0.5, 1.25])), shown(np.arange(64, dtype=np.uint8).reshape(8, 8))
      ('[0.5, 1.25]', '0 to 63')
    """
    if values.ndim == 0:
        return _number(values)
    if values.size == 0:
        return "no values"
    if values.ndim == 1 and values.size <= 4:
        return f"[{', '.join(_number(value) for value in values)}]"
    if values.dtype.kind == "b":
        return f"{int(np.count_nonzero(values)):,} of {values.size:,} True"
    if values.dtype.kind == "c":
        return f"magnitudes {_range(np.abs(values))}"
    return _range(values)


def _range(values: Array) -> str:
    numbers = values if values.dtype.kind in "iu" else values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    others = values.size - finite.size
    least, greatest = (_number(finite.min()), _number(finite.max())) if finite.size else ("", "")
    found = [] if not finite.size else [f"all {least}"] if least == greatest else [f"{least} to {greatest}"]
    return ", ".join([*found, *([f"{others:,} not finite"] if others else [])])


def _number(value: Any) -> str:
    kind = np.asarray(value).dtype.kind
    if kind in "iub":
        return str(value)
    return f"{complex(value):.4g}" if kind == "c" else f"{float(value):.4g}"
