"""How fast does a feed deliver rows to the mesh, compared with only copying the same rows?

Copying is measured twice: by `np.take`, and by the fastest gather known. The claim, 0.85 of `np.take` with 16 MB
batches from memory, is refuted by a lower median on a quiet machine.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline._src.feed import Feed
from feedline._src.tools.bench.limit import MemoryLimit, fastest_gather
from feedline._src.tools.bench.rounds import Entrant, alternate, compared

_WARM_UP = 8
"""Batches taken before a measurement, so that batches that were already prefetched are not measured."""


def matrix(
    folder: Path,
    data_bytes: int,
    row_bytes: Sequence[int],
    batch_bytes: Sequence[int],
    rounds: int,
    seconds: float,
    report: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Feeds of shuffled uint8 rows from memory and from a mapped, cached file, to one device and to all.

    Args:
      folder: where the file is written; it is removed at the end.
      data_bytes: size of the source: much larger than the processor's caches.
      row_bytes, batch_bytes: every pair is measured.
      rounds, seconds: of each feed and of both limits, measured alternately.
      report: called with each result.

    Returns:
      for each pair {"row_bytes", "batch_bytes", "batch_size", "devices", "threads",
      "entrants": {name: the result of `compared`, in rows/s, with "of_gather" and "of_gather_interval" added}}.
      The entrant "limit" is `np.take`, and "gather" the fastest gather known.
    """
    found = []
    flat = filler(data_bytes)
    with _file_of(flat, folder) as path:
        for size in row_bytes:
            rows = flat[: len(flat) // size * size].reshape(-1, size)
            mapped = np.load(path, mmap_mode="r")[: rows.size].reshape(rows.shape)
            for wanted in batch_bytes:
                result = _measured(rows, mapped, wanted, rounds, seconds)
                report(result)
                found.append(result)
    return found


def _measured(
    rows: npt.NDArray[Any], mapped: npt.NDArray[Any], batch_bytes: int, rounds: int, seconds: float
) -> dict[str, Any]:
    devices = jax.devices()
    size = rows.shape[1]
    batch_size = max(1, batch_bytes // size // len(devices)) * len(devices)
    with contextlib.ExitStack() as stack:
        entrants: dict[str, Entrant] = {}
        threads = 0
        for name, source in (("memory", rows), ("mapped", mapped)):
            for count in sorted({1, len(devices)}, reverse=True):
                mesh = Mesh(np.array(devices[:count]), ("data",))
                feed = stack.enter_context(Feed(source, batch_size, NamedSharding(mesh, PartitionSpec("data"))))
                threads = max(1, feed.statistics().threads)
                entrants[f"{name} → {count}"] = _taking(feed, batch_size)
        entrants["limit"] = MemoryLimit(rows, batch_size, threads).rate
        entrants["gather"] = MemoryLimit(rows, batch_size, threads, fastest_gather).rate
        alternate(entrants, 1, seconds / 4)  # everything is compiled, mapped and cached
        rates = alternate(entrants, rounds, seconds)
    found, beside_gather = compared(rates, "limit"), compared(rates, "gather")
    for name, entrant in found.items():
        entrant["of_gather"] = beside_gather[name]["of_limit"]
        entrant["of_gather_interval"] = beside_gather[name]["of_limit_interval"]
    return {
        "row_bytes": size,
        "batch_bytes": batch_bytes,
        "batch_size": batch_size,
        "devices": len(devices),
        "threads": threads,
        "entrants": found,
    }


def _taking(feed: Feed, batch_size: int) -> Entrant:
    """Rows per second of a loop that waits for each batch and does nothing with it."""

    def rate(seconds: float) -> float:
        for _ in range(_WARM_UP):
            jax.block_until_ready(next(feed))
        began, batches = time.perf_counter(), 0
        while batches == 0 or time.perf_counter() - began < seconds:
            jax.block_until_ready(next(feed))
            batches += 1
        return batches * batch_size / (time.perf_counter() - began)

    return rate


def measure_feed(feed: Feed, seconds: float) -> dict[str, Any]:
    """Measures how fast a user's feed delivers, and the time of each stage.

    Args:
      feed: endless, or with more batches than are taken.
      seconds: duration, after a warm-up.

    Returns:
      {"rows_per_s", "gb_per_s", "batches_per_s", "read_s", "transform_s", "place_s", "wait_s": seconds a batch,
      "threads", "workers", "batch_size"}; reading and transforming are summed over threads.
    """
    leaves = jax.tree.leaves(feed.spec)
    batch_size = leaves[0].shape[0]
    batches = itertools.chain.from_iterable(itertools.repeat(feed))  # pass after pass
    for _ in range(_WARM_UP):
        jax.block_until_ready(next(batches))
    before, began, count = feed.statistics(), time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < seconds:
        jax.block_until_ready(next(batches))
        count += 1
    took, after = time.perf_counter() - began, feed.statistics()
    bytes_a_batch = sum(np.dtype(leaf.dtype).itemsize * int(np.prod(leaf.shape)) for leaf in leaves)
    shares = ("read_s", "transform_s", "place_s", "wait_s")
    return {
        "batch_size": batch_size,
        "batches_per_s": count / took,
        "rows_per_s": (after.rows - before.rows) / took,
        "gb_per_s": count * bytes_a_batch / took / 1e9,
        **{name: (getattr(after, name) - getattr(before, name)) / count for name in shares},
        "threads": after.threads,
        "workers": after.workers,
    }


def filler(size: int) -> npt.NDArray[np.uint8]:
    """Random uint8[size]; the same 16 MiB repeat."""
    part = np.random.default_rng(0).integers(256, size=1 << 24, dtype=np.uint8)
    flat = np.empty(size, np.uint8)
    for start in range(0, size, len(part)):
        flat[start : start + len(part)] = part[: size - start]
    return flat


@contextlib.contextmanager
def _file_of(flat: npt.NDArray[np.uint8], folder: Path) -> Iterator[Path]:
    path = folder / f"feedline-bench-{len(flat)}.npy"
    try:
        np.save(path, flat)
        yield path
    finally:
        path.unlink(missing_ok=True)
