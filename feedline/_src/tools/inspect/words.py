"""Short texts for bytes, spans, leaves, values and shardings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from feedline._src.rows.spec import Array

Span = tuple[int, int]
"""Adjacent indices: the first, and the one after the last."""
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SPANS = 3


def in_bytes(count: int) -> str:
    """A number of bytes.

    Example:
      >>> in_bytes(999), in_bytes(1536), in_bytes(3 << 40)
      ('999 B', '1.5 KiB', '3 TiB')
    """
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:,.4g} {unit}" if count < 9999 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def spans(indices: Iterable[int]) -> list[Span]:
    """Ascending indices as spans of adjacent ones.

    Example:
      >>> spans([0, 1, 2, 6, 7])
      [(0, 3), (6, 8)]
    """
    runs = itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0])
    found = [[int(index) for _, index in run] for _, run in runs]
    return [(run[0], run[-1] + 1) for run in found]


def in_spans(found: Sequence[Span], letter: str = "") -> str:
    """Spans as numbers with a letter in front; the end of a span belongs to it.

    Example:
      >>> in_spans([(0, 16), (32, 33)]), in_spans(spans(range(0, 20, 2)), "d")
      ('0–15, 32', 'd0, d2, d4, … d18')
    """
    texts = [f"{letter}{start:,}" + (f"–{stop - 1:,}" if stop > start + 1 else "") for start, stop in found]
    return ", ".join(texts if len(texts) <= _SPANS + 1 else [*texts[:_SPANS], f"… {texts[-1]}"])


def leaf_title(name: str) -> str:
    """A leaf's name without quotes and brackets.

    Example:
      >>> leaf_title("batch['image']"), leaf_title("batch['a'][0]"), leaf_title("batch")
      ('image', 'a.0', 'batch')
    """
    parts = name.removeprefix("batch").replace("[", "").replace("'", "").split("]")
    return ".".join(part for part in parts if part) or "batch"


def in_words(sharding: jax.sharding.Sharding) -> str:
    """The PartitionSpec of a sharding, as it is written with `P`; the kind of any other sharding."""
    spec: Any = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else f"P({', '.join(map(repr, spec))})"


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
