"""Rows for a case to read, and the batches that a feed of them must deliver, computed by NumPy.

A row is x int32[8], y int32[] and z float32[2]. A source has a function that returns all rows of an epoch,
in order; `batches` cuts them into global batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

import feedline
from feedline._src.order.epoch import keys_at, rows_at

from .cases import Here
from .layouts import sharding_of

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
    """The arguments of a feed, and the rows that it must deliver.

    Attributes:
      arguments: returns the arguments of `Feed`, given a folder to write files to.
      epoch: returns all rows of an epoch, in order.
      streams: whether it has no random access: it then pads a batch with rows of that batch.
    """

    arguments: Callable[[Path], dict[str, Any]]
    epoch: Callable[[int], Batch]
    streams: bool = False

    def feed(self, here: Here, layout: str, size: int, **options: Any) -> feedline.Feed:
        """A feed of this source, in a case."""
        arguments = self.arguments(here.folder)
        return feedline.Feed(**arguments, batch_size=size, sharding=sharding_of(layout, here.devices), **options)


def _in_memory(folder: Path) -> dict[str, Any]:
    return {"source": ROWS, "order": ORDER}


def _npy(folder: Path) -> dict[str, Any]:
    for name, leaf in ROWS.items():
        np.save(folder / f"{name}.npy", leaf)
    return {"source": {name: folder / f"{name}.npy" for name in ROWS}, "order": ORDER}


def _shuffled(epoch: int) -> Batch:
    order = rows_at(ORDER, N, epoch, np.arange(N))
    return {name: leaf[order] for name, leaf in ROWS.items()}


def _transformed(folder: Path) -> dict[str, Any]:
    return {**_npy(folder), "transform": _augment}


def _augment(batch: Batch, rows: feedline.Rows) -> Batch:
    """Rotates each row of x by its key. The other leaves hold index, epoch and position of the rows."""
    columns = (np.arange(8, dtype=np.uint64) + rows.key[:, None]) % 8
    return {
        "x": np.take_along_axis(batch["x"], columns.astype(np.int64), axis=1),
        "y": rows.index.astype(np.int32),
        "z": np.stack([rows.epoch, rows.position], axis=1).astype(np.float32),
    }


def _augmented(epoch: int) -> Batch:
    keys = keys_at(ORDER.seed, epoch, np.arange(N)).tolist()
    rows = _shuffled(epoch)
    return {
        "x": np.stack([np.roll(x, -(key % 8)) for x, key in zip(rows["x"], keys, strict=True)]),
        "y": rows["y"],
        "z": np.array([(epoch, position) for position in range(N)], np.float32),
    }


def _encoded(folder: Path) -> dict[str, Any]:
    """One file for each row. Decoding it gives what `_augment` gives."""
    files = folder / "encoded"
    files.mkdir(parents=True)
    for row, x in enumerate(ROWS["x"]):
        (files / f"{row:02d}").write_bytes(x.tobytes())
    spec = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in ROWS.items()}
    return {"source": feedline.decoded(files, _decode, spec), "order": ORDER}


def _decode(record: bytes, out: Batch, row: Any) -> None:
    out["x"][...] = np.roll(np.frombuffer(record, np.int32), -(row.key % 8))
    out["y"][...] = row.index
    out["z"][...] = row.epoch, row.position


def _dataset() -> grain.MapDataset[Batch]:
    """The rows, with random numbers of Grain as z. They differ between epochs."""
    rows = grain.MapDataset.range(N).map(lambda i: {name: leaf[i] for name, leaf in ROWS.items()})
    return rows.seed(3).random_map(lambda row, generator: {**row, "z": generator.random(2, np.float32)})


def _records(folder: Path) -> dict[str, Any]:
    return {"source": _dataset(), "order": ORDER}


def _recorded(epoch: int) -> Batch:
    order = rows_at(ORDER, N, epoch, np.arange(N))
    return _stacked([_dataset()[epoch * N + row] for row in order.tolist()])


def _stream() -> grain.IterDataset[Batch]:
    """A stream of some of these rows. Its length is unknown before it is read."""
    return _dataset().to_iter_dataset(grain.ReadOptions(1, 2)).filter(lambda row: row["y"] % 7 != 0)


def _stacked(rows: list[Batch]) -> Batch:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


SOURCES = {
    "memory": Source(_in_memory, _shuffled),
    "npy": Source(_npy, _shuffled),
    "transform": Source(_transformed, _augmented),
    "encoded": Source(_encoded, _augmented),
    "records": Source(_records, _recorded),
    "stream": Source(lambda folder: {"source": _stream()}, lambda epoch: _stacked(list(_stream())), streams=True),
}


def batches(source: Source, epochs: int, size: int, remainder: str) -> list[Batch]:
    """The global batches of the first epochs. Incomplete ones are treated as `remainder` says."""
    parts = [source.epoch(epoch) for epoch in range(epochs)]
    if remainder == "wrap":
        parts = [jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)]
    return [
        _padded(rows, start, size, source.streams) if remainder == "pad" else _slice(rows, start, size)
        for rows in parts
        for start in range(0, len(rows["y"]), size)
        if remainder == "pad" or start + size <= len(rows["y"])
    ]


def _slice(rows: Batch, start: int, size: int) -> Batch:
    return {name: leaf[start : start + size] for name, leaf in rows.items()}


def _padded(rows: Batch, start: int, size: int, streams: bool) -> Batch:
    n = len(rows["y"])
    again = np.arange(start if streams else 0, n)  # the rows that fill up the batch, repeated as needed
    at = np.concatenate([np.arange(start, min(start + size, n)), np.resize(again, max(0, start + size - n))])
    return {**{name: leaf[at] for name, leaf in rows.items()}, "valid": np.arange(start, start + size) < n}
