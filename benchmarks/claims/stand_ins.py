"""Why does a feed not reach the memory limit?

This measures the same feed with a stage replaced by one that costs nothing: the order computed beforehand,
placing left out, or both; and the whole feed with more batches ahead. The gain is the cost of the stage, including
the waits of other threads that it causes. Refuted as an explanation if a feed without both is still below 0.8 of
the limit at 16 MB.

    python benchmarks/claims/stand_ins.py --out stand_ins.json
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.limit import MemoryLimit, filler
from shared.rounds import Entrant, alternate, compared
from shared.script import parser, save

import feedline
from feedline._src.placement.place import Placement
from feedline._src.sources.arrays import ArraySource

FEEDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # the stages that are left out, and settings
    "whole": ((), {}),
    "four ahead": ((), {"prefetch": 4, "reading": feedline.Reading(buffer=4)}),
    "order beforehand": (("order",), {}),
    "not placed": (("place",), {}),
    "neither": (("order", "place"), {}),
}
SIZES = [(256, 16), (3072, 16), (153_600, 16), (256, 4), (3072, 4), (153_600, 4)]  # bytes of a row, MB of a batch


@contextlib.contextmanager
def without(stages: tuple[str, ...], order: np.ndarray) -> Iterator[None]:
    """Replace these stages by functions that cost nothing."""
    with contextlib.ExitStack() as stack:
        if "order" in stages:

            def read(source: ArraySource, _: Any, epoch: int, positions: range, cuts: Any) -> np.ndarray:
                rows = order[positions.start : positions.stop]
                for leaf, columns, out in cuts:
                    source.read_leaf(leaf, rows, columns, out)
                return rows

            stack.enter_context(mock.patch.object(ArraySource, "read_in_order", read))
        if "place" in stages:
            stack.enter_context(mock.patch.object(Placement, "place", lambda _, leaves: leaves))
        yield


def taking(
    feed: feedline.Feed, batch_size: int, stages: tuple[str, ...], order: np.ndarray, cpu: list[float]
) -> Any:
    """Rows per second, with the stages left out; the number of busy cores is appended to `cpu`."""

    def rate(seconds: float) -> float:
        with without(stages, order):
            for _ in range(8):
                jax.block_until_ready(next(feed))
            began, busy, batches = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - began < seconds:
                jax.block_until_ready(next(feed))
                batches += 1
            took = time.perf_counter() - began
            cpu.append((time.process_time() - busy) / took)
            return batches * batch_size / took

    return rate


def measured(flat: np.ndarray, row_bytes: int, batch_mb: float, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the limit and the feeds alternately."""
    rows = flat[: len(flat) // row_bytes * row_bytes].reshape(-1, row_bytes)
    batch_size = int(batch_mb * 1e6) // row_bytes // 8 * 8
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    order = np.random.default_rng(0).permutation(len(rows))
    cpu: dict[str, list[float]] = {name: [] for name in FEEDS}
    with contextlib.ExitStack() as stack:
        entrants: dict[str, Entrant] = {}
        for name, (stages, settings) in FEEDS.items():
            with without(stages, order):
                feed = stack.enter_context(feedline.Feed(rows, batch_size, sharding, **settings))
                next(feed)
            entrants[name] = taking(feed, batch_size, stages, order, cpu[name])
        entrants["limit"] = MemoryLimit(rows, batch_size, max(1, feed.statistics().threads)).rate
        alternate(entrants, 1, seconds / 4)
        rates = alternate(entrants, rounds, seconds)
    found = compared(rates, "limit")
    for name, busy in cpu.items():
        found[name]["cores_busy"] = statistics.median(busy)
    return {"row_bytes": row_bytes, "batch_mb": batch_mb, "batch_size": batch_size, "entrants": found}


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--gib", type=float, default=1.5)
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--seconds", type=float, default=0.5)
    options = asked.parse_args()
    flat, results = filler(int(options.gib * 2**30)), []
    print("share of the memory limit (cores busy)")
    for row_bytes, batch_mb in SIZES:
        result = measured(flat, row_bytes, batch_mb, options.rounds, options.seconds)
        results.append(result)
        shown = (
            f"{name} {result['entrants'][name]['of_limit']:.2f} ({result['entrants'][name]['cores_busy']:.2f})"
            for name in FEEDS
        )
        print(f"{row_bytes:>7} B, {batch_mb:>2} MB:", ", ".join(shown), flush=True)
    save("stand-ins", options, results=results)


if __name__ == "__main__":
    main()
