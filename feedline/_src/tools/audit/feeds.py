"""Builds the user's feed with the options of a layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from jax.sharding import Mesh

from feedline._src.feed import Feed
from feedline._src.tools.audit.layouts import Layout
from feedline._src.tools.audit.target import MakeFeed


def build_feed(
    make_feed: MakeFeed, mesh: Mesh, layout: Layout, batch_size: int | None = None
) -> tuple[Feed, dict[str, Any]]:
    """The feed with the options of a layout, and all arguments with which it was built.

    Raises:
      TypeError: `make_feed` did not build and return a feed.
    """
    with arguments_of_feeds(functools.partial(_changed_by, layout, batch_size)) as arguments:
        feed = make_feed(mesh)
    if id(feed) not in arguments:
        raise TypeError(
            f"make_feed(mesh) must build a feedline.Feed and return it, a new one in every call; got {feed!r}"
        )
    return feed, arguments[id(feed)]


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


@contextlib.contextmanager
def arguments_of_feeds(change: Callable[[dict[str, Any]], None]) -> Iterator[dict[int, dict[str, Any]]]:
    """Wraps the constructor of `Feed`, so that `change` can change arguments; yields {id(feed): its arguments}.

    So `make_feed` can be the function that the training calls, without parameters for the command. The arguments
    are there before the feed is built, and so also those of a feed that was refused.
    """
    usual = Feed.__init__
    signature = inspect.signature(usual)
    seen: dict[int, dict[str, Any]] = {}

    def build(self: Feed, *args: Any, **options: Any) -> None:
        bound = signature.bind(self, *args, **options)
        bound.apply_defaults()
        change(bound.arguments)
        seen[id(self)] = {name: value for name, value in bound.arguments.items() if name != "self"}
        usual(*bound.args, **bound.kwargs)

    Feed.__init__ = build  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Feed.__init__ = usual  # type: ignore[method-assign]


def _changed_by(layout: Layout, batch_size: int | None, given: dict[str, Any]) -> None:
    """Replace the options of a feed by those of a layout."""
    size = given["batch_size"]
    if isinstance(size, list | tuple):  # sizes that change with the step: the first one is audited
        size = size[0][1]
    given["batch_size"] = (batch_size or size) * layout.times
    if layout.workers is not None:
        given["reading"] = dataclasses.replace(given["reading"], workers=layout.workers)
    if layout.threads is not None:  # with a buffer of one batch, all threads read parts of the same batch
        given["reading"] = dataclasses.replace(given["reading"], threads=layout.threads, buffer=1)
