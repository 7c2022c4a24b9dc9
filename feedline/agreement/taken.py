"""How many batches this process has taken of the feeds that all processes of a mesh built together."""

from __future__ import annotations

from collections.abc import Mapping


class Taken:
    """The count of one feed, which the training thread replaces with each batch."""

    __slots__ = ("batches",)

    def __init__(self) -> None:
        self.batches = 0


_feeds: dict[str, Taken] = {}


def taken_of(key: str) -> Taken:
    """The count of a new feed.

    Args:
      key: the same for this feed in every process.
    """
    _feeds[key] = Taken()
    return _feeds[key]


def counts() -> dict[str, int]:
    """By key, the batches that this process has taken of each feed so far, open or closed."""
    return {key: taken.batches for key, taken in _feeds.copy().items()}


def more_than(other: Mapping[str, int]) -> tuple[int, int] | None:
    """The first feed of which this process has taken more batches than another one: (its count, our count).

    None: there is no such feed.

    Example:
      >>> taken_of("a feed").batches = 3
      >>> more_than({"a feed": 2, "a feed of others": 7})
      (2, 3)
    """
    own = counts()
    pairs = ((count, own[key]) for key, count in other.items() if key in own)
    return next((pair for pair in pairs if pair[0] < pair[1]), None)
