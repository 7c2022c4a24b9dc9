"""The feed that is audited, built with the options of a layout."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from feedline.audit.layouts import Layout
from feedline.audit.target import MakeFeed
from feedline.feed import Feed


def built(
    make_feed: MakeFeed, mesh: Mesh, layout: Layout, batch_size: int | None = None
) -> tuple[Feed, dict[str, Any]]:
    """The feed with the options of a layout, and all arguments that it was built with.

    Raises:
      TypeError: `make_feed` gave no feed.
    """
    with _built_with(layout, batch_size) as arguments:
        feed = make_feed(mesh)
    if id(feed) not in arguments:
        raise TypeError(
            f"make_feed(mesh) must build a feedline.Feed and return it, a new one in every call; got {feed!r}"
        )
    return feed, arguments[id(feed)]


def endless(feed: Feed) -> Iterator[Any]:
    """The batches of all passes."""
    barren = 0
    while barren < 2:  # one that was restored at the end of a pass begins with an empty one
        barren += 1
        for batch in feed:
            barren = 0
            yield batch
    raise ValueError("a pass of the feed must hold at least one batch, and this one's holds none")


@contextlib.contextmanager
def _built_with(layout: Layout, batch_size: int | None) -> Iterator[dict[int, dict[str, Any]]]:
    """While entered, a Feed is built with other options than it is given; {id(feed): its arguments}.

    It wraps the constructor, so that `make_feed` can be the very function that trains, without parameters
    for the audit.
    """
    usual = Feed.__init__
    signature = inspect.signature(usual)
    seen: dict[int, dict[str, Any]] = {}

    def build(self: Feed, *args: Any, **options: Any) -> None:
        bound = signature.bind(self, *args, **options)
        bound.apply_defaults()
        given = bound.arguments
        given["batch_size"] = (batch_size or given["batch_size"]) * layout.times
        if layout.workers is not None:
            given["reading"] = dataclasses.replace(given["reading"], workers=layout.workers)
        if layout.threads is not None:  # a place in the buffer for one batch: all threads share it
            given["reading"] = dataclasses.replace(given["reading"], threads=layout.threads, buffer=1)
        usual(*bound.args, **bound.kwargs)
        seen[id(self)] = {name: value for name, value in given.items() if name != "self"}

    Feed.__init__ = build  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Feed.__init__ = usual  # type: ignore[method-assign]
