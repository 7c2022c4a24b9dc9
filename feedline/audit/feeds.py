"""The feed that is audited: the user's own or one over a file, built with the options of a layout."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline.audit.layouts import Layout
from feedline.feed import Feed
from feedline.loader.sources import open_source

MakeFeed = Callable[[Mesh], Feed]
_EPOCH_BATCHES = 8
_BATCH_ELEMENTS = 1 << 20


def maker(target: str, devices: int) -> MakeFeed:
    """The function that `module:function` names, or one that makes a feed of all leaves of a path or glob.

    Raises:
      ImportError, AttributeError: there is no such function.
      ValueError: the file has too few rows.
    """
    if re.fullmatch(r"[\w.]+:\w+", target) and not os.path.exists(target):
        module, _, function = target.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    size = _size_of_batch(target, devices)
    return lambda mesh: Feed(target, size, NamedSharding(mesh, PartitionSpec("data")))


def _size_of_batch(path: str, devices: int) -> int:
    """Rows of a batch that all devices share evenly: some batches to an epoch, and a million numbers at most."""
    source = open_source(path)
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
