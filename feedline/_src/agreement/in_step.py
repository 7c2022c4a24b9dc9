"""Whether the processes that built a feed together take the same batches of it. Nothing here waits.

A batch follows from how many batches were taken before it, and from the moves by `seek` and `set_state` between
them. So at equal counts all processes are at the same place, and only what they have done by a point that their
programs share can be compared: their moves, one by one; and their counts when they close the feed, or end.
"""

from __future__ import annotations

import collections
import contextlib
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from feedline._src.agreement.coordination import Coordination, coordination
from feedline._src.errors import FeedError

_KEPT_COUNTS = 64
"""Counts that stay after their feeds are gone: a program that builds a feed for each evaluation has thousands."""
_KEPT_MOVES = 64
"""Moves of a feed that stay in the service: a process that is further behind is compared at later ones."""


class Place(NamedTuple):
    """Where a batch begins: the batches delivered before it over all resumes, and the place of its first row."""

    step: int
    epoch: int
    position: int


class Count(NamedTuple):
    """What a process has done with a feed: batches taken (of several steps in one call: calls), and moves.

    Attributes:
      failed: the latest `next` raised an error, which says more than the counts that it leaves.
    """

    batches: int
    moves: int
    failed: bool = False

    def __str__(self) -> str:
        moves = f" and made {_counted(self.moves, 'move')} by seek or set_state" if self.moves else ""
        return _counted(self.batches, "batch", "batches") + moves


def _counted(number: int, one: str, more: str | None = None) -> str:
    return f"{number} {one if number == 1 else more or f'{one}s'}"


class _Move(NamedTuple):
    """After taking `batches` batches, a process went to `place` and took its next batch from there."""

    process: int
    batches: int
    place: Place

    def __str__(self) -> str:
        _, epoch, position = self.place
        taken = _counted(self.batches, "batch", "batches")
        return f"process {self.process} went to epoch {epoch}, position {position} after {taken}"


_gone: collections.deque[tuple[str, tuple[int, int, bool]]] = collections.deque(maxlen=_KEPT_COUNTS)


class InStep:
    """Compares what this process does with a feed with what the other processes do. Used by the training thread.

    What differs is returned as a sentence for the user. Calls of the service take about 0.3 ms each.

    Args:
      key: a path for keys of this feed, the same in every process, which ends with the number of the feed.
      members: the number of processes that built the feed.

    Attributes:
      batches: taken by this process, outside of `diagnose`. The feed sets it with each delivery.
      moves: by `seek` or `set_state`, each followed by a call of `next`.
      failed_at: the batches taken when `next` raised an error the last time.
    """

    __slots__ = ("__weakref__", "_members", "_path", "_service", "batches", "failed_at", "key", "moves")

    def __init__(self, service: Coordination, key: str, members: int) -> None:
        self.key = key
        self.batches = 0
        self.moves = 0
        self.failed_at = -1
        self._service = service
        self._members = members
        self._path = f"{key}/in_step"
        _of_feeds.add(weakref.ref(self, _of_feeds.discard))

    def __del__(self, gone: collections.deque[tuple[str, tuple[int, int, bool]]] = _gone) -> None:
        # at exit the names of this module may be None
        gone.append((self.key, (self.batches, self.moves, self.failed_at == self.batches)))

    @property
    def count(self) -> Count:
        return Count(self.batches, self.moves, self.failed_at == self.batches)

    def moved(self, place: Place) -> str | None:
        """Compare a move with another process's move of the same number. The first one to make it publishes it.

        Args:
          place: where the next batch begins.
        """
        if coordination() is None:  # it has been shut down
            return None
        own = _Move(self._service.process, self.batches, place)
        if self._service.set(self._key_of(self.moves), json.dumps(own)):
            if self.moves >= _KEPT_MOVES:
                self._service.delete(self._key_of(self.moves - _KEPT_MOVES))
        elif (first := self._move(self.moves)) is not None and first[1:] != own[1:]:
            return _sentence(self.key, f"{first}, and {own}")
        self.moves += 1
        return None

    def missed_move(self) -> str | None:
        """Find a move of another process after which this one has taken a batch without it. For any thread."""
        moves = self.moves
        first, batches = self._move(moves), self.batches
        # the training thread counts a move before the batch after it, so `moves` is looked at last
        if (
            first is None
            or first.process == self._service.process
            or batches <= first.batches
            or moves != self.moves
        ):
            return None
        return _sentence(self.key, f"{first}, and process {self._service.process} took {batches} without that")

    def closed(self) -> str | None:
        """Compare counts with the process that closed the feed first. To be called once.

        None also if the service has been shut down, or has gone with process 0, which the monitor reports.
        """
        if coordination() is None:
            return None
        key, own, first = f"{self._path}/closed", [self._service.process, self.count], None
        with contextlib.suppress(FeedError):
            if not self._service.set(key, json.dumps(own)):
                first = self._service.try_get(key)
            if self._service.increment(f"{self._path}/closings") == self._members:
                self._service.delete(self._path)
        if first is None:
            return None
        process, count = json.loads(first)
        return _difference(self.key, process, Count(*count), self._service.process, self.count)

    def _move(self, number: int) -> _Move | None:
        found = self._service.try_get(self._key_of(number))
        if found is None:
            return None
        process, batches, place = json.loads(found)
        return _Move(process, batches, Place(*place))

    def _key_of(self, move: int) -> str:
        return f"{self._path}/moves/{move}"


_of_feeds: set[weakref.ref[InStep]] = set()
"""Any thread adds; the copy of a set is atomic, and so is that of a deque."""


def counts() -> dict[str, Count]:
    """By key, what this process has done with each feed, and with the latest ones that are gone."""
    gone = {key: Count(*count) for key, count in _gone.copy()}
    return gone | {feed.key: feed.count for feed in _open()}


def missed_move() -> str | None:
    """The first move of another process that this one has missed, in words; None if there is none."""
    return next((found for feed in _open() if (found := feed.missed_move())), None)


def ends_differ(other: int, ended: Mapping[str, Sequence[Any]], process: int) -> str | None:
    """How the counts of a process that has reached its end differ from those of this process, in words.

    Args:
      ended: `counts` of process `other`, perhaps as JSON. A feed that only one of the two has is left out.
      process: this one.
    """
    own = counts()
    found = (_difference(key, other, Count(*ended[key]), process, own[key]) for key in ended if key in own)
    return next(filter(None, found), None)


def more_than(other: Mapping[str, Sequence[Any]]) -> tuple[int, int] | None:
    """The first feed of which this process has taken more batches than another one: (its count, our count).

    Args:
      other: the `counts` of that process, perhaps as JSON.

    Returns:
      None: there is no such feed.
    """
    own = counts()
    pairs = ((count[0], own[key].batches) for key, count in other.items() if key in own)
    return next((pair for pair in pairs if pair[0] < pair[1]), None)


def _open() -> list[InStep]:
    return [feed for reference in _of_feeds.copy() if (feed := reference()) is not None]


def _difference(key: str, first: int, one: Count, second: int, two: Count) -> str | None:
    """What to say of two processes, of which the first has done `one` with a feed and the second `two`.

    Example:
      >>> print(_difference("agree/2-a/1", 0, Count(12, 0), 1, Count(13, 0)))
      the processes are out of step in feed 1 (feeds are counted as they are built): process 0 took 12 batches, \
and process 1 took 13 batches; look for a next, seek, set_state or break that not all processes reach, as under \
`if jax.process_index() == 0`
    """
    if one == two or one.failed or two.failed:
        return None
    return _sentence(key, f"process {first} took {one}, and process {second} took {two}")


def _sentence(key: str, found: str) -> str:
    return (
        f"the processes are out of step in feed {key.rpartition('/')[2]} (feeds are counted as they are built): "
        f"{found}; look for a next, seek, set_state or break that not all processes reach, as under "
        "`if jax.process_index() == 0`"
    )
