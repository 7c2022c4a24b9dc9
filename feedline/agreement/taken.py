"""How many batches this process has taken of the feeds that all processes of a mesh built together."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Mapping

_KEPT = 64
"""Counts that stay after their feeds are gone: a program that builds a feed for each evaluation has thousands."""
_gone: collections.deque[tuple[str, int]] = collections.deque(maxlen=_KEPT)


class Taken:
    """The count of one feed, which the training thread replaces with each delivery.

    Attributes:
      key: the same for this feed in every process.
      batches: so many were delivered. Those of one delivery, for several steps in one call, count as one.
    """

    __slots__ = ("__weakref__", "batches", "key")

    def __init__(self, key: str) -> None:
        self.key = key
        self.batches = 0

    def __del__(self, gone: collections.deque[tuple[str, int]] = _gone) -> None:
        gone.append((self.key, self.batches))  # an argument, since at exit the names of a module may be None


_of_feeds: set[weakref.ref[Taken]] = set()
"""Any thread adds; the copy of a set is atomic, and so is that of a deque."""


def taken_of(key: str) -> Taken:
    """The count of a new feed, which holds it.

    Args:
      key: the same for this feed in every process.
    """
    taken = Taken(key)
    _of_feeds.add(weakref.ref(taken, _of_feeds.discard))
    return taken


def counts() -> dict[str, int]:
    """By key, the batches that this process has taken of each feed, and of the latest ones that are gone."""
    found = [taken for reference in _of_feeds.copy() if (taken := reference()) is not None]
    return dict(_gone.copy()) | {taken.key: taken.batches for taken in found}


def more_than(other: Mapping[str, int]) -> tuple[int, int] | None:
    """The first feed of which this process has taken more batches than another one: (its count, our count).

    None: there is no such feed.

    Example:
      >>> taken = taken_of("a feed")
      >>> taken.batches = 3
      >>> more_than({"a feed": 2, "a feed of others": 7})
      (2, 3)
    """
    own = counts()
    pairs = ((count, own[key]) for key, count in other.items() if key in own)
    return next((pair for pair in pairs if pair[0] < pair[1]), None)
