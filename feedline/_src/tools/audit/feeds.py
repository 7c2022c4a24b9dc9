"""Builds the user's feed with the options of a layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from feedline._src.building import building
from feedline._src.feed import Feed
from feedline._src.feed_options import FeedOptions
from feedline._src.tools.audit.layouts import Layout
from feedline._src.tools.audit.target import MakeFeed


def build_feed(make_feed: MakeFeed, mesh: Mesh, layout: Layout, batch_size: int | None = None) -> Feed:
    """The feed with the options of a layout.

    So `make_feed` can be the function that the training calls, without parameters for the command.

    Raises:
      TypeError: `make_feed` did not build and return a feed.
    """
    built: list[FeedOptions] = []

    def change(options: FeedOptions) -> FeedOptions:
        built.append(_changed_by(layout, batch_size, options))
        return built[-1]

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


def _changed_by(layout: Layout, batch_size: int | None, options: FeedOptions) -> FeedOptions:
    """The options of a feed with those of a layout in their place. Of sizes that change the first is audited."""
    reading = options.reading
    if layout.workers is not None:
        reading = dataclasses.replace(reading, workers=layout.workers)
    if layout.threads is not None:  # with a buffer of one batch, all threads read parts of the same batch
        reading = dataclasses.replace(reading, threads=layout.threads, buffer=1)
    size = (batch_size or options.first_batch_size) * layout.times
    return dataclasses.replace(options, batch_size=size, reading=reading)
