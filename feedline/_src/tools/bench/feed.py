"""Measures how fast a user's feed delivers, the limit of the machine, and how long each stage takes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from feedline import prefetch_to_mesh
from feedline._src.feed import Feed

STAGES = ("read_s", "transform_s", "place_s", "wait_s")
_WARM_UP = 8
"""Batches taken before a measurement, so that no batch that was prefetched earlier is measured."""


def measure_feed(feed: Feed, seconds: float) -> dict[str, Any]:
    """Take batches for `seconds` after a warm-up, in a loop that waits for each batch and does nothing with it.

    Times of stages are in seconds a batch; reading and transforming are summed over threads. "limit_rows_per_s" is
    the rate of the same loop without reads and transform: see `_limit`.
    """
    batches = itertools.chain.from_iterable(itertools.repeat(feed))
    _timed(batches, at_least=_WARM_UP)
    before = feed.statistics()
    count, took = _timed(batches, seconds)
    after, batch, per_call = feed.statistics(), next(batches), feed.options.steps_per_call
    leaves, count = jax.tree.leaves(batch), count * per_call
    rows = math.prod(leaves[0].shape[: 1 if per_call == 1 else 2])
    return {
        "batch_size": feed.batch_size,
        "batches_per_s": count / took,
        "rows_per_s": (after.rows - before.rows) / took,
        "gb_per_s": (after.rows - before.rows) / took * sum(leaf.nbytes for leaf in leaves) / rows / 1e9,
        **{name: (getattr(after, name) - getattr(before, name)) / count for name in STAGES},
        "limit_rows_per_s": _limit(batch, feed.prefetch, seconds) * rows,
        "threads": after.threads,
        "workers": after.workers,
    }


def _limit(batch: Any, prefetch: int, seconds: float) -> float:
    """Batches per second if one batch in host memory is copied, placed and prefetched again and again."""
    host = jax.tree.map(np.asarray, batch)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, batch)
    with prefetch_to_mesh(itertools.repeat(host), shardings, prefetch) as batches:
        _timed(batches, at_least=_WARM_UP)
        count, took = _timed(batches, seconds)
    return count / took


def _timed(batches: Iterator[Any], seconds: float = 0.0, at_least: int = 1) -> tuple[int, float]:
    """Take batches for `seconds`, waiting for each to arrive. Returns their number, and the seconds they took."""
    began, count = time.perf_counter(), 0
    while count < at_least or time.perf_counter() - began < seconds:
        jax.block_until_ready(next(batches))
        count += 1
    return count, time.perf_counter() - began
