"""Short texts for bytes, spans, devices, leaves and shardings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from feedline._src.tools.inspect.reads import Span, spans

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


def in_spans(found: Sequence[Span]) -> str:
    """Spans, of which the ends belong to them.

    Example:
      >>> in_spans([(0, 16), (32, 33)]), in_spans([(i, i + 1) for i in range(0, 20, 2)])
      ('0–15, 32', '0, 2, 4, … 18')
    """
    texts = [f"{start:,}" if stop == start + 1 else f"{start:,}–{stop - 1:,}" for start, stop in found]
    if len(texts) > _SPANS + 1:
        texts = [*texts[:_SPANS], f"… {texts[-1]}"]
    return ", ".join(texts)


def numbered(numbers: Iterable[int], letter: str = "") -> str:
    """Ascending numbers, adjacent ones together.

    Example:
      >>> numbered([0, 1, 2, 5], "d")
      'd0–2, d5'
    """
    parts = in_spans(spans(np.array(sorted(numbers)))).split(", ")
    return ", ".join(f"{letter}{part}" if part[0].isdigit() else f"… {letter}{part[2:]}" for part in parts)


def plural(count: int, one: str, several: str = "") -> str:
    """A count with its noun.

    Example:
      >>> plural(1, "row"), plural(2000, "row"), plural(3, "process", "processes")
      ('1 row', '2,000 rows', '3 processes')
    """
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


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
