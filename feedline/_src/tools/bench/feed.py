"""Measures how fast a user's feed delivers, the limit of the machine, and how long each stage takes."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import jax
import numpy as np

from feedline._src.feed import Feed

STAGES = ("read_s", "transform_s", "place_s", "wait_s")
_WARM_UP = 8
"""Batches taken before the measurement, so that no batch that was prefetched earlier is measured."""


def measure_feed(feed: Feed, seconds: float) -> dict[str, Any]:
    """Take batches for `seconds` after a warm-up, in a loop that waits for each batch and does nothing with it.

    Times of stages are in seconds a batch; reading and transforming are summed over threads. "limit_rows_per_s" is
    the rate of placing a batch that is already in host memory, measured for another quarter of `seconds`.
    """
    batches = itertools.chain.from_iterable(itertools.repeat(feed))
    for _ in range(_WARM_UP):
        jax.block_until_ready(next(batches))
    before, began, count = feed.statistics(), time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < seconds:
        jax.block_until_ready(next(batches))
        count += 1
    took, after = time.perf_counter() - began, feed.statistics()
    batch, per_call = next(batches), feed.options.steps_per_call
    leaves, count = jax.tree.leaves(batch), count * per_call
    rows = math.prod(leaves[0].shape[: 1 if per_call == 1 else 2])
    return {
        "batch_size": feed.batch_size,
        "batches_per_s": count / took,
        "rows_per_s": (after.rows - before.rows) / took,
        "gb_per_s": (after.rows - before.rows) / took * sum(leaf.nbytes for leaf in leaves) / rows / 1e9,
        **{name: (getattr(after, name) - getattr(before, name)) / count for name in STAGES},
        "limit_rows_per_s": _placing_rate(batch, seconds / 4) * rows,
        "threads": after.threads,
        "workers": after.workers,
    }


def _placing_rate(batch: Any, seconds: float) -> float:
    """Batches per second, if each is placed from host memory after the previous one has arrived."""
    host = jax.tree.map(np.asarray, batch)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, batch)
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < seconds:
        jax.block_until_ready(jax.device_put(host, shardings))
        count += 1
    return count / (time.perf_counter() - began)
