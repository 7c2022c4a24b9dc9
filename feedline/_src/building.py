"""`building`: a context in which every feed that is built goes through functions of a tool."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from feedline._src.feed_options import FeedOptions


class _Hooks(NamedTuple):
    change: Callable[[FeedOptions], FeedOptions] | None
    asked: Callable[[Any], None] | None


_entered: list[_Hooks] = []


@contextlib.contextmanager
def building(
    change: Callable[[FeedOptions], FeedOptions] | None = None, *, asked: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """In this context every feed that this process builds, in any thread, goes through `change`.

    So a tool can look at the feeds of a program, or build them with other options, and the program need not know
    of it. Contexts may be nested; the outer one is asked first.

    Args:
      change: what a feed was asked for → what is built. An exception of it is raised by `Feed(...)`.
      asked: called with a feed that was built in this context, before it gives a batch, on the thread that asks.

    Example:
      >>> import dataclasses, jax, numpy as np
      >>> from feedline import Feed, building
      >>> with building(lambda options: dataclasses.replace(options, prefetch=0)):
      ...     feed = Feed({"x": np.zeros((64, 2))}, 8, jax.devices()[0])
      >>> feed.prefetch
      0
      >>> feed.close()
    """
    hooks = _Hooks(change, asked)
    _entered.append(hooks)
    try:
        yield
    finally:
        _entered.remove(hooks)


def changed(options: FeedOptions) -> FeedOptions:
    """These options as the contexts that are entered now change them."""
    for hooks in tuple(_entered):
        if hooks.change is not None:
            options = hooks.change(options)
    return options


def asked_hooks() -> tuple[Callable[[Any], None], ...]:
    """What the contexts that are entered now want to be called with."""
    return tuple(hooks.asked for hooks in _entered if hooks.asked is not None)
