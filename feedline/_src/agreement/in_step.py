"""Checks that the processes that built a feed together take the same batches of it. Nothing here waits.

The next batch depends only on the number of batches taken so far, and on the moves by `seek` and `set_state`
between them. Processes can be compared only at points that all reach: their n-th moves with each other, and
their counts of batches and moves when the feed is closed and when the program ends.
"""

from __future__ import annotations

import collections
import contextlib
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from feedline._src.agreement.coordination import Comparison, Coordination, coordination
from feedline._src.errors import FeedError

_KEPT_FEEDS = 64  # counts of this many deleted feeds are kept, and `LatestValues` of this many feeds
_KEPT_MOVES = 64  # how many moves of a feed the service keeps; a process that is further behind is not compared
_latest = collections.defaultdict[int, dict[str, None]](dict)  # {process: the keys of its values, oldest first}
_gone: collections.deque[tuple[str, tuple[int, int, bool]]] = collections.deque(maxlen=_KEPT_FEEDS)
_dropped: collections.deque[tuple[str, int]] = collections.deque()  # feeds that were deleted, but not closed


class Place(NamedTuple):
    """Where a batch begins: how many batches came before it, over all resumes, and where its first row is.

    `order`: for a mixture, a digest of its order, because `set_state` may change it.
    """

    step: int
    epoch: int
    position: int
    order: str = ""


class Count(NamedTuple):
    """How many deliveries of a feed (each one batch, or `steps_per_call`) a process took, and its moves."""

    batches: int
    moves: int
    failed: bool = False  # the latest `next` raised; counts are not compared then, since its error explains more

    def __str__(self) -> str:
        moves = f" and made {self.moves} move{'s' if self.moves > 1 else ''} by seek or set_state"
        return _batches(self.batches) + (moves if self.moves else "")


class InStep:
    """Compares batches and moves of a feed between processes. Methods return a difference as a sentence for users.

    The feed updates `batches` at each delivery, and sets `failed_at` to `batches` when `next` raises an error.
    `moves` counts the moves by `seek` or `set_state` after which reading began. `members` is the number of
    processes that built the feed.
    """

    __slots__ = (
        "__weakref__", "_closed", "_comparison", "_members", "_service", "batches", "failed_at", "key", "moves",
    )  # fmt: skip

    def __init__(self, service: Coordination, key: str, members: int, batches: int = 0) -> None:
        self.key = key
        self.batches = batches
        self.moves = 0
        self.failed_at = -1
        self._service = service
        self._members = members
        self._comparison = Comparison(service, _KEPT_MOVES)
        self._closed = False
        with contextlib.suppress(IndexError):  # none is left; another thread may have taken the last one
            while True:
                _forget(service, *_dropped.popleft())
        _of_feeds.add(weakref.ref(self, _of_feeds.discard))

    def __del__(
        self,
        gone: collections.deque[tuple[str, tuple[int, int, bool]]] = _gone,
        dropped: collections.deque[tuple[str, int]] = _dropped,
    ) -> None:
        # these are default values because at exit the names of this module may be None
        gone.append((self.key, (self.batches, self.moves, self.failed_at == self.batches)))
        if not self._closed:
            dropped.append((self.key, self._members))

    @property
    def count(self) -> Count:
        return Count(self.batches, self.moves, self.failed_at == self.batches)

    def moved(self, place: Place) -> str | None:
        """Compare this process's n-th move, which leads to `place`, with the n-th moves of the other processes.

        Afterwards, the feed adds 1 to `moves`. If an interrupt prevents that, the feed compares the move again.
        """
        if coordination() is None:  # jax has been shut down
            return None
        own = [self.batches, place]
        if first := self._comparison.differing(self._key_of(self.moves), own):
            return _sentence(self.key, f"{_moved(*first)}, and {_moved(self._service.process, own)}")
        return None

    def missed_move(self) -> str | None:
        """Find a move of another process that this process skipped. Returns a sentence, or None. Thread-safe."""
        moves = self.moves
        first, batches = self._service.try_get(self._key_of(moves)), self.batches
        if first is None:
            return None
        process, move = json.loads(first)
        if process == self._service.process or batches <= move[0]:
            return None
        if moves != self.moves:  # compare again after reading `batches`: the move may have just been made
            return None
        own = f"process {self._service.process} took {_batches(batches)} without that move"
        return _sentence(self.key, f"{_moved(process, move)}, and {own}")

    def closed(self) -> str | None:
        """Compare this process's counts with the counts of the first process that closed the feed. Call it once.

        The last process to close deletes the feed's keys, except published times, which reports use. If a feed is
        garbage-collected unclosed, its closing is counted when the process builds its next feed. Returns None if
        nothing differs, the service was shut down, or process 0 ended; the monitor reports the latter.
        """
        if coordination() is None:
            return None
        first = None
        with contextlib.suppress(FeedError):
            first = self._comparison.differing(f"{self.key}/closed", self.count)
            self._closed = True
            _forget(self._service, self.key, self._members)
        return first and _difference(self.key, first[0], Count(*first[1]), self._service.process, self.count)

    def _key_of(self, move: int) -> str:
        return f"{self.key}/moves/{move}"


def _forget(service: Coordination, key: str, members: int) -> None:
    if service.increment(f"{key}/closings") == members:
        service.delete(key)


_of_feeds: set[weakref.ref[InStep]] = set()
"""Any thread may add to this set and to `_gone`, because each is read only as a copy, and copying is atomic."""


def counts() -> dict[str, Count]:
    """This process's counts for each existing feed and for the latest deleted ones, by the feed's key."""
    gone = {key: Count(*count) for key, count in _gone.copy()}
    return gone | {feed.key: feed.count for feed in _open()}


def missed_move() -> str | None:
    """Find the first move of another process that this process skipped, in any feed, as a sentence."""
    return next((found for feed in _open() if (found := feed.missed_move())), None)


def counts_by_group() -> dict[str, dict[str, Count]]:
    """The counts of each group of processes that built feeds together, by a name of the group."""
    groups: dict[str, dict[str, Count]] = {}
    for key, count in counts().items():
        groups.setdefault(key.split("/")[-2], {})[key] = count
    return groups


def ends_differ(other: int, ended: Mapping[str, Sequence[Any]], process: int) -> str | None:
    """Compare this process's counts with the counts of process `other`, which has ended. Returns a sentence."""
    own = counts()
    found = (_difference(key, other, Count(*ended[key]), process, own[key]) for key in ended if key in own)
    return next(filter(None, found), None)


def more_than(other: Mapping[str, Sequence[Any]]) -> tuple[int, int] | None:
    """Find a feed of which another process took fewer batches than this one. Returns (its count, ours) or None."""
    own = counts()
    pairs = ((count[0], own[key].batches) for key, count in other.items() if key in own)
    return next((pair for pair in pairs if pair[0] < pair[1]), None)


def _open() -> list[InStep]:
    return [feed for reference in _of_feeds.copy() if (feed := reference()) is not None]


def _difference(key: str, first: int, one: Count, second: int, two: Count) -> str | None:
    if one == two or one.failed or two.failed:
        return None
    return _sentence(key, f"process {first} took {one}, and process {second} took {two}")


def _sentence(key: str, found: str) -> str:
    return (
        f"the processes are out of step in feed {key.rpartition('/')[2]} (feeds are numbered as they are built): "
        f"{found}; look for a next, seek, set_state or break that not all processes reach, as under "
        "`if jax.process_index() == 0`"
    )


def _moved(process: int, move: Sequence[Any]) -> str:
    batches, (_, epoch, position, order) = move
    rows = f" in the order {order[:8]}" if order else ""  # the order of a mixture depends on its weights
    return f"process {process} went to epoch {epoch}, position {position}{rows} after {_batches(batches)}"


def _batches(number: int) -> str:
    return "1 batch" if number == 1 else f"{number} batches"


class LatestValues:
    """One string per process. Each process replaces its own string at any time, and reads all without waiting.

    Any thread may call the methods. ProcessError: process 0 cannot be reached.
    """

    def __init__(self, service: Coordination, key: str) -> None:
        self._service = service
        self._path = f"{key}-latest"  # not below the key, because closing the feed deletes all keys below it

    def publish(self, value: str) -> None:
        key = f"{self._path}/{self._service.process}"
        self._service.replace(key, value)
        kept = _latest[self._service.process]
        kept.pop(key, None)
        kept[key] = None
        if len(kept) > _KEPT_FEEDS:
            oldest = next(iter(kept.copy()))  # a copy, because another thread may add or remove a key
            kept.pop(oldest, None)
            self._service.delete(oldest)

    def read(self) -> dict[int, str]:
        """The latest value of each process that has published one."""
        return self._service.by_process(self._path)
