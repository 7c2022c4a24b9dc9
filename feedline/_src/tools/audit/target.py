"""Finds the function that makes the user's feed, and builds the feed with the options of a layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline._src.building import building
from feedline._src.feed import Feed
from feedline._src.feed_options import FeedOptions
from feedline._src.sources.open_source import open_arrays
from feedline._src.tools.audit.layouts import Layout
from feedline._src.tools.cli.options import is_name, load_name

MakeFeed = Callable[[Mesh], Feed]
_EPOCH_BATCHES = 8
_BATCH_ELEMENTS = 1 << 20


def load_make_feed(target: str, devices: int) -> MakeFeed:
    """The function that `module:function` names, or a function that makes a feed of all leaves of a path or glob.

    Raises:
      ValueError: there is no such function, or there are too few rows.
    """
    if is_name(target):
        return load_name(target)  # type: ignore[no-any-return]
    size = _size_of_batch(target, devices)
    return lambda mesh: Feed(target, size, NamedSharding(mesh, PartitionSpec("data")))


def _size_of_batch(path: str, devices: int) -> int:
    """A multiple of `devices`: about an eighth of the rows, and at most about a million numbers in a batch."""
    source = open_arrays(path)
    rows, leaves = len(source), jax.tree.leaves(source.spec)
    source.close()
    if rows < 2 * devices:
        raise ValueError(
            f"this audit divides batches among {devices} devices and needs at least {2 * devices} rows, {path} "
            f"has {rows}; audit more rows, or fewer processes, as in --processes 1,2"
        )
    row = sum(math.prod(leaf.shape) for leaf in leaves)
    fitting: int = max(1, min(rows // _EPOCH_BATCHES, _BATCH_ELEMENTS // max(1, row)) // devices) * devices
    return fitting


def build_feed(make_feed: MakeFeed, mesh: Mesh, layout: Layout, batch_size: int | None = None) -> Feed:
    """The feed with the options of a layout.

    So `make_feed` can be the function that the training calls, without parameters for the command. Of batch sizes
    that change, the first one is used; of several steps per call, each step is a batch. The leaf of `with_place`
    is left out, since its numbers depend on the batch size.

    Raises:
      TypeError: `make_feed` did not build and return a feed.
    """
    built: list[FeedOptions] = []

    def change(options: FeedOptions) -> FeedOptions:
        reading = options.reading
        if layout.workers is not None:
            reading = dataclasses.replace(reading, workers=layout.workers)
        if layout.threads is not None:  # with a buffer of one batch, all threads read parts of the same batch
            reading = dataclasses.replace(reading, threads=layout.threads, buffer=1)
        size = (batch_size or options.first_batch_size) * layout.times
        changed = dataclasses.replace(
            options, batch_size=size, reading=reading, steps_per_call=1, with_place=False
        )
        built.append(changed)
        return changed

    with building(change):
        feed = make_feed(mesh)
    if not isinstance(feed, Feed) or feed.options not in built:
        raise TypeError(
            f"make_feed(mesh) must build a feedline.Feed and return it, a new one in every call; got {feed!r}"
        )
    return feed


def endless_batches(feed: Feed) -> Iterator[Any]:
    """The batches of all passes."""
    empty_passes = 0
    while empty_passes < 2:  # a feed that was restored at the end of a pass begins with an empty pass
        empty_passes += 1
        for batch in feed:
            empty_passes = 0
            yield batch
    raise ValueError(
        "a pass of the feed must hold at least one batch, and this feed's hold none; use a smaller batch size"
    )
