"""Builds the feed for a target on the command line: module:make_feed, or a path of files with rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline._src.feed import Feed
from feedline._src.feed_options import FeedOptions, building
from feedline._src.sources.as_source import open_arrays
from feedline._src.tools.cli.options import is_name, load_name

MakeFeed = Callable[[Mesh], Any]
Change = Callable[[FeedOptions], FeedOptions]
_EPOCH_BATCHES = 8
_BATCH_ELEMENTS = 1 << 20


def load_make_feed(target: str, devices: int) -> MakeFeed:
    """The function that `module:function` names; for a path or glob, one that makes a feed of all its leaves."""
    if is_name(target):
        found: Any = load_name(target)
        if not callable(found):
            raise TypeError(
                f"{target} must be a function that builds a feed over a mesh, got a {type(found).__name__}"
            )
        return found  # type: ignore[no-any-return]
    size = _size_of_batch(target, devices)
    return lambda mesh: Feed(target, size, NamedSharding(mesh, PartitionSpec("data")))


def _size_of_batch(path: str, devices: int) -> int:
    """About an eighth of the rows, but at most about a million numbers in a batch; a multiple of `devices`."""
    source = open_arrays(path)
    rows, leaves = len(source), jax.tree.leaves(source.spec)
    source.close()
    if rows < 2 * devices:
        raise ValueError(
            f"batches are divided among {devices} devices here, so at least {2 * devices} rows are needed, but "
            f"{path} has {rows}; add rows, or use fewer devices or processes, as in --processes 1,2"
        )
    row = sum(math.prod(leaf.shape) for leaf in leaves)
    fitting: int = max(1, min(rows // _EPOCH_BATCHES, _BATCH_ELEMENTS // max(1, row)) // devices) * devices
    return fitting


def one_size(options: FeedOptions) -> FeedOptions:
    """The options with only the first batch size, with one batch per delivery, and without the leaf `place`."""
    return dataclasses.replace(options, batch_size=options.sizes[0][1], steps_per_call=1, with_place=False)


def build_feed(name: str, make_feed: MakeFeed, mesh: Mesh, change: Change) -> Feed:
    """Call the user's function to build a feed over a mesh, with changed options.

    `Feed` itself applies `change`, so `make_feed` can be the function that the training program calls.
    """
    built: list[FeedOptions] = []

    def changed(options: FeedOptions) -> FeedOptions:
        built.append(change(options))
        return built[-1]

    with building(changed):
        feed = make_feed(mesh)
    if not isinstance(feed, Feed) or feed.options not in built:
        raise TypeError(f"{name} must build a feedline.Feed and return it, a new one in every call; got {feed!r}")
    return feed
