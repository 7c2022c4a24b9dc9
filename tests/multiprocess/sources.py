"""Rows for a case to read, and what NumPy says the run over them is.

A row is x int32[8], y int32 [] and z float32[2]. The oracle of a source is each epoch of it, whole
and in order; `batches` cuts global batches out of such epochs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

import feedline
from feedline.order import keys_at, rows_at

N = 42
ORDER = feedline.Order(seed=5)
ROWS = {
    "x": np.arange(N * 8, dtype=np.int32).reshape(N, 8),
    "y": np.arange(N, dtype=np.int32),
    "z": np.linspace(0, 1, N * 2, dtype=np.float32).reshape(N, 2),
}
Batch = dict[str, np.ndarray[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Source:
    """What a feed is told to read, and what it must deliver.

    Attributes:
      arguments: those of `Feed` that say it; a folder to write files to is given.
      epoch: the rows of an epoch, whole and in order.
      streams: whether it is a stream, which pads a batch with that batch's own rows.
    """

    arguments: Callable[[Path], dict[str, Any]]
    epoch: Callable[[int], Batch]
    streams: bool = False


def batches(source: Source, epochs: int, size: int, remainder: str) -> list[Batch]:
    """The global batches of the first epochs."""
    parts = [source.epoch(epoch) for epoch in range(epochs)]
    if remainder == "wrap":
        parts = [jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)]
    return [batch for part in parts for batch in _cut(part, size, remainder, source.streams)]


def _cut(rows: Batch, size: int, remainder: str, streams: bool) -> list[Batch]:
    n = len(rows["y"])
    ends = range(n, n + size) if remainder == "pad" else [n]
    found = []
    for start in range(0, n, size):
        at = np.arange(start, start + size)
        first = start if streams else 0  # of the rows that padding repeats
        real = np.where(at < n, at, first + (at - n) % (n - first))
        batch = {name: leaf[real] for name, leaf in rows.items() if at[-1] < ends[-1]}
        if batch:
            found.append({**batch, "valid": at < n} if remainder == "pad" else batch)
    return found
