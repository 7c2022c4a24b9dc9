"""Conversion of what the command line names, a path, a source or a function that makes a feed, to options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from feedline._src.building import building
from feedline._src.feed import Feed
from feedline._src.feed_options import FeedOptions
from feedline._src.order.schedule import Remainder
from feedline._src.tools.cli.options import is_name, source_named
from feedline._src.tools.inspect.contents import Contents, contents_of
from feedline._src.tools.inspect.description import default_batch_size, sharding_of


class Resolved(NamedTuple):
    """What is to be described.

    Attributes:
      contents: what the source holds.
      options: what a feed is asked for.
      refusal: why the user's function could not build that feed; None if it could, or if there is no function.
    """

    contents: Contents
    options: FeedOptions
    refusal: Exception | None


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Arguments of a feed from the command line. None: the feed's own, or the default of `feedline.Feed`."""

    batch_size: int | None = None
    remainder: Remainder | None = None
    prefetch: int | None = None
    buffer: int | None = None

    def of(self, options: FeedOptions) -> FeedOptions:
        """These options with the arguments that are given here in their place."""
        given = {name: getattr(self, name) for name in ("batch_size", "remainder", "prefetch")}
        if self.buffer is not None:
            given["reading"] = dataclasses.replace(options.reading, buffer=self.buffer)
        return dataclasses.replace(options, **{name: value for name, value in given.items() if value is not None})


def resolve(target: str, mesh: Mesh, entries: Sequence[Any] | None, overrides: Overrides) -> Resolved:
    """What is to be described.

    Args:
      target: a path, a glob, or module:name.
      mesh: over which a feed is made.
      entries: of the batch's PartitionSpec; None: the first axis of the mesh, or the shardings of the user's feed.
      overrides: arguments of the feed.

    Raises:
      ValueError, TypeError, OSError: there is no such source, or no feed of it.
      FeedError: its first rows cannot be read.
    """
    named = source_named(target) if is_name(target) else target
    if callable(named):
        if entries is not None:
            raise ValueError(
                f"--spec is for a path or a source; {target} shards the batch itself. Leave --spec out"
            )
        return _of_feed(target, named, mesh, overrides)
    contents = contents_of(named)
    sharding = sharding_of(contents, mesh, mesh.axis_names[:1] if entries is None else entries)
    options = FeedOptions(named, default_batch_size(contents, sharding), sharding)
    return Resolved(contents, overrides.of(options), None)


def _of_feed(target: str, make_feed: Callable[[Mesh], Any], mesh: Mesh, overrides: Overrides) -> Resolved:
    """What the feed is asked for that a function makes, also if that feed is refused."""
    asked: list[FeedOptions] = []

    def change(options: FeedOptions) -> FeedOptions:
        asked.append(overrides.of(options))
        return asked[-1]

    refusal = None
    with building(change):
        try:
            feed = make_feed(mesh)
        except (ValueError, TypeError) as error:
            if not asked:
                raise
            options, refusal = asked[-1], error
        else:
            if not isinstance(feed, Feed) or feed.options not in asked:
                raise TypeError(f"{target} must build a feedline.Feed and return it, got {feed!r}")
            options = feed.options
            feed.close()
    return Resolved(contents_of(options.source, options.transform), options, refusal)
