"""Checks of a user's feed: its options, and the batches that it delivers first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from feedline._src.cluster.cgroups import limits
from feedline._src.tools.doctor.batches import Leaf, batch_checks
from feedline._src.tools.doctor.check import Check, judged
from feedline._src.tools.doctor.machine import allowed_processors, usable
from feedline._src.tools.targets import build_feed, load_make_feed, one_size

_BATCHES = 3


def feed_checks(target: str) -> Iterator[Check]:
    """Build the feed over all devices of this process, take a few batches, and check both.

    Args:
      target: module:make_feed, or a path or glob of rows.

    Raises:
      ValueError: there is no such function.
    """
    devices = jax.devices()
    make_feed, mesh = load_make_feed(target, len(devices)), Mesh(np.array(devices)[:, None], ("data", "model"))
    with build_feed(target, make_feed, mesh, one_size) as feed:
        leaves = leaves_of(itertools.islice(feed, _BATCHES))
        statistics = feed.statistics()
    yield from batch_checks(leaves)
    yield check_prefetch(feed.prefetch)
    processors = usable(len(allowed_processors()), limits().processors)
    yield check_feed_threads(statistics.threads + statistics.workers, processors)


def leaves_of(batches: Iterable[Any]) -> list[Leaf]:
    """The leaves of batches, with the values of all batches. Each is fetched from one device."""
    found: dict[str, Leaf] = {}
    for batch in batches:
        for path, array in jax.tree_util.tree_leaves_with_path(batch):
            name = jax.tree_util.keystr(path)
            found[name] = Leaf.of(name, array, found.get(name))
    return list(found.values())


def check_prefetch(prefetch: int) -> Check:
    """The depth of prefetch."""
    return judged(
        "depth of prefetch",
        "ok" if prefetch >= 2 else "warning",
        f"prefetch={prefetch}",
        "prefetch=2, the default; it costs the memory of one more batch on the devices",
        "a GPU allocates memory for a batch only after the steps that were enqueued before, so that with 1 the "
        "transfer does not overlap with compute; with 0 nothing does"
        if prefetch
        else "without prefetching, each batch is read and placed while the accelerators wait",
        prefetch=prefetch,
    )


def check_feed_threads(readers: int, processors: int) -> Check:
    """Compare reading threads and workers with the processors of this process."""
    return judged(
        "reading threads",
        "ok" if readers <= max(2, processors) else "warning",
        f"{readers} reading threads and workers on {processors} processors",
        f"Reading(threads={processors}), or more processors for the process",
        "threads that compute take the processors from each other, and from the training thread; threads that "
        "wait for a slow disk or a network do not",
        threads_and_workers=readers,
        processors=processors,
    )
