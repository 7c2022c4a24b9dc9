"""Checks of a user's feed: its options, and the batches that it delivers first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from feedline._src.tools.audit.feeds import build_feed
from feedline._src.tools.audit.layouts import AXES, Layout
from feedline._src.tools.audit.target import load_make_feed
from feedline._src.tools.doctor.batches import Leaf, Values, batch_checks
from feedline._src.tools.doctor.check import Check
from feedline._src.tools.doctor.processors import processors, usable_count

_BATCHES = 3


def feed_checks(target: str) -> Iterator[Check]:
    """Builds the feed over all devices of this process, takes a few batches, and checks both.

    Args:
      target: module:make_feed, or a path or glob of rows.

    Raises:
      ValueError: there is no such function.
    """
    devices = jax.devices()
    try:
        make_feed = load_make_feed(target, len(devices))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target} must name a module and a function in it that makes a feed: {error}") from error
    layout = Layout("doctor", 1, len(devices), (len(devices), 1))
    mesh = Mesh(np.array(devices)[:, None], AXES)
    feed = build_feed(make_feed, mesh, layout)
    with feed:
        leaves = leaves_of(list(itertools.islice(feed, _BATCHES)))
        statistics = feed.statistics()
    yield from batch_checks(leaves)
    yield check_prefetch(feed.prefetch)
    yield check_feed_threads(statistics.threads + statistics.workers, usable_count(processors()))


def leaves_of(batches: list[Any]) -> list[Leaf]:
    """The leaves of the first batch, with the values of all batches. Each is fetched from one device."""
    values: dict[str, Values] = {}
    for batch in batches:
        for path, array in jax.tree_util.tree_leaves_with_path(batch):
            name = jax.tree_util.keystr(path)
            sample = Values.of(np.asarray(array.addressable_data(0)))
            values[name] = values.get(name, Values()).both(sample)
    return [
        Leaf(
            jax.tree_util.keystr(path),
            array.shape,
            str(array.dtype),
            array.sharding.num_devices,
            array.sharding.is_fully_replicated,
            values[jax.tree_util.keystr(path)],
        )
        for path, array in jax.tree_util.tree_leaves_with_path(batches[0])
    ]


def check_prefetch(prefetch: int) -> Check:
    """The depth of prefetch."""
    measured = {"prefetch": prefetch}
    if prefetch >= 2:
        return Check("depth of prefetch", "ok", f"prefetch={prefetch}", "", "", measured)
    return Check(
        "depth of prefetch",
        "warning",
        f"prefetch={prefetch}",
        "prefetch=2, the default; it costs the memory of one more batch on the devices",
        "a GPU allocates memory for a batch only after the steps that were enqueued before, so that with 1 the "
        "transfer does not overlap with compute; with 0 nothing does"
        if prefetch
        else "without prefetching, each batch is read and placed while the accelerators wait",
        measured,
    )


def check_feed_threads(readers: int, usable: int) -> Check:
    """Reading threads and workers against the processors of this process."""
    measured = {"threads_and_workers": readers, "processors": usable}
    finding = f"{readers} reading threads and workers on {usable} processors"
    if readers <= max(2, usable):
        return Check("reading threads", "ok", finding, "", "", measured)
    return Check(
        "reading threads",
        "warning",
        finding,
        f"Reading(threads={usable}), or more processors for the process",
        "threads that compute take the processors from each other, and from the training thread; threads that "
        "wait for a slow disk or a network do not",
        measured,
    )
