"""Conversion of what the command line names, a path, a source or a function that makes a feed, to a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from feedline._src.options import Reading
from feedline._src.order.schedule import Remainder
from feedline._src.pipeline.request import Request
from feedline._src.placement.plan import as_shardings
from feedline._src.tools.audit.feeds import arguments_of_feeds
from feedline._src.tools.audit.target import is_name, load_name
from feedline._src.tools.inspect.contents import Contents, contents_of
from feedline._src.tools.inspect.description import default_batch_size, sharding_of


class Resolved(NamedTuple):
    """What is to be described.

    Attributes:
      contents: what the source holds.
      request: what a feed is asked for.
      refusal: why the user's function could not build that feed; None if it could, or if there is no function.
    """

    contents: Contents
    request: Request
    refusal: Exception | None


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Arguments of a feed from the command line. None: the feed's own, or the default of `feedline.Feed`."""

    batch_size: int | None = None
    remainder: Remainder | None = None
    prefetch: int | None = None
    buffer: int | None = None

    def apply(self, arguments: dict[str, Any]) -> None:
        """Replace those arguments of a feed that are given here."""
        for name in ("batch_size", "remainder", "prefetch"):
            if getattr(self, name) is not None:
                arguments[name] = getattr(self, name)
        if self.buffer is not None:
            arguments["reading"] = dataclasses.replace(arguments["reading"], buffer=self.buffer)


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
    named = _named(target) if is_name(target) else target
    if callable(named):
        if entries is not None:
            raise ValueError(
                f"--spec is for a path or a source; {target} shards the batch itself. Leave --spec out"
            )
        return _of_feed(target, named, mesh, overrides)
    contents = contents_of(named)
    arguments: dict[str, Any] = {"remainder": "drop", "prefetch": 2, "reading": Reading()}
    sharding = sharding_of(contents, mesh, mesh.axis_names[:1] if entries is None else entries)
    arguments["batch_size"] = default_batch_size(contents, sharding)
    overrides.apply(arguments)
    arguments["batch_sizes"] = arguments.pop("batch_size")
    request = Request(source=named, sharding=sharding, order=None, epochs=None, transform=None, **arguments)
    return Resolved(contents, request, None)


def _named(target: str) -> Any:
    try:
        return load_name(target)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"SOURCE is a path, a glob or module:name, and loading {target} failed with {type(error).__name__}: "
            f"{error}; run the command in the folder of the module, and check both names"
        ) from error


def _of_feed(target: str, make_feed: Callable[[Mesh], Any], mesh: Mesh, overrides: Overrides) -> Resolved:
    """The request of the feed that a function makes, also if that feed is refused."""

    def change(arguments: dict[str, Any]) -> None:
        overrides.apply(arguments)
        arguments["sharding"] = as_shardings(arguments["sharding"])  # here, where a mesh may be set

    refusal = None
    with arguments_of_feeds(change) as seen:
        try:
            feed = make_feed(mesh)
        except (ValueError, TypeError) as error:
            if not seen:
                raise
            arguments, refusal = list(seen.values())[-1], error
        else:
            if id(feed) not in seen:
                raise TypeError(f"{target} must build a feedline.Feed and return it, got {feed!r}")
            arguments = seen[id(feed)]
            feed.close()
    arguments["batch_sizes"] = arguments["batch_size"]
    request = Request(**{field.name: arguments[field.name] for field in dataclasses.fields(Request)})
    return Resolved(contents_of(request.source, request.transform), request, refusal)
