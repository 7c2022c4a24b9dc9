"""Which blocks of the objects of a source are mapped, and when an evicted one may be let go of."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from feedline._src.files.fetcher import fetcher, result_of
from feedline._src.files.store import Store
from feedline._src.stores.ahead import AHEAD, MOST
from feedline._src.stores.cache import cache_of

Indices = npt.NDArray[np.int64]
BLOCK_BYTES = 1 << 21
"""A row of a shuffled batch costs a block the first time, so a larger one delays the first batch on a slow link.
Each is a file of the cache, so a smaller one makes more of them."""
_EVERY_S = 20.0
_OTHER_MAPPINGS = 1 << 14
"""Of a process: libraries, stacks of threads, slabs; and blocks that are let go of, but still read."""
_KEPT = 7 / 8
"""The share of the mapped blocks that remains, so that not every block that is mapped lets go of one."""


class _Object(Protocol):
    url: Any
    first_block: int

    @property
    def fetching(self) -> int: ...
    def fetch(self, blocks: Sequence[int]) -> list[concurrent.futures.Future[None]]: ...
    def name(self, block: int) -> str: ...
    def retire(self, block: int) -> None: ...
    def unmap(self, block: int) -> None: ...


class Residency:
    """The cache of a source, and its mapped blocks, which are numbered over all of its objects.

    An evicted block is deleted from the cache folder by any process, and keeps its space on disk while it is
    mapped. So this class notices it, and unmaps it once all reads have ended that began before; a later read
    fetches it again. Where the process has as many blocks mapped as Linux allows, the same happens to those that
    were not read for the longest time, of any source.

    Attributes:
      cache: on local disk.
      mapped: how many blocks are there.
    """

    def __init__(self, options: Store) -> None:
        self.cache = cache_of(options)
        self._objects: list[_Object] = []
        self._firsts = np.zeros(0, np.int64)
        self._present = np.zeros(0, bool)
        self._used_at = np.zeros(0, np.int32)
        """When each block was read last, or mapped: seconds on the monotonic clock."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._reads: dict[int, None] = {}
        """The numbers of the reads in progress, ascending. Guarded by _lock."""
        self._retired: dict[int, int] = {}
        """Blocks to be unmapped once no read with a lower number is in progress. Guarded by _lock."""
        self._complete = False
        """All blocks are there. Set to True, and to False together with retiring blocks, under _lock."""
        self._complete_at = 0
        """When all blocks were last read, as far as is known: while all are there, nobody notes which."""
        self._maintained = time.monotonic()
        self._evictions = 0
        self._counting = threading.Lock()
        self.mapped = 0
        _sources.add(self)

    def reserve(self, blocks: int) -> None:
        """Make room for all blocks of all objects, before the first is added."""
        self._present, self._used_at = np.zeros(blocks, bool), np.zeros(blocks, np.int32)

    def add(self, item: _Object, blocks: int) -> tuple[int, npt.NDArray[np.bool_]]:
        """The number of the first block of an object, and a view of which of them are present."""
        first = int(self._firsts[-1]) if len(self._firsts) else 0
        self._firsts = np.append(self._firsts if len(self._firsts) else [0], first + blocks)
        self._objects.append(item)
        return first, self._present[first : first + blocks]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Blocks that are there within the `with` block stay there until its end."""
        with self._lock:
            number = next(self._numbers)
            self._reads[number] = None
        try:
            yield
        finally:
            with self._lock:
                del self._reads[number]
                self._unmap()

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are there. Within `reading`, they then all stay."""
        self._maintain()
        if not self._complete:
            with self._lock:
                self._complete = bool(self._present.all())
        if self._complete:
            self._complete_at = _now()
        return self._complete

    def wait_for(self, blocks: Indices) -> None:
        """Fetch blocks that are not there. Called within `reading`.

        Raises:
          FeedError: they cannot be fetched.
        """
        self._used_at[blocks] = _now()
        self._maintain()
        if self._present[blocks].all():
            return
        began = time.monotonic()
        try:
            for item, future in self._start(blocks):
                result_of(future, item.url)
        finally:
            fetcher().counts.wait_s += time.monotonic() - began

    def fetch_ahead(self, blocks: Indices, ahead: int) -> bool:
        """Start to fetch blocks that are needed `ahead` batches later. Returns False if that is too early.

        It is too early while enough is being fetched to keep the link busy, and where the batches until then would
        not fit into a quarter of the cache, or of what may be mapped, which could evict blocks before they are
        read.
        """
        needed = len(np.unique(blocks)) * BLOCK_BYTES
        if (ahead + 1) * needed > min(self.cache.limit_bytes, most_mapped() * BLOCK_BYTES) * AHEAD:
            return False
        if sum(item.fetching for item in self._objects) >= MOST:
            return False
        self._start(blocks)
        return True

    def _start(self, blocks: Indices) -> list[tuple[_Object, concurrent.futures.Future[None]]]:
        missing = np.unique(blocks[~self._present[blocks]]).tolist()
        return [(item, future) for item, some in self._by_object(missing) for future in item.fetch(some)]

    def _by_object(self, blocks: Sequence[int]) -> Iterator[tuple[_Object, list[int]]]:
        """Blocks of each object, by their numbers in it."""
        numbers = np.searchsorted(self._firsts, np.asarray(blocks, np.int64), side="right") - 1
        for number, some in itertools.groupby(zip(numbers.tolist(), blocks, strict=True), lambda pair: pair[0]):
            item = self._objects[number]
            yield item, [block - item.first_block for _, block in some]

    def _maintain(self) -> None:
        """Every 20 s, and after an eviction: say which blocks are in use, and retire those that are gone."""
        if sum(source.mapped for source in _all_sources()) > most_mapped():
            _make_room()
        now = time.monotonic()
        evictions = self.cache.evictions
        if now < self._maintained + _EVERY_S and evictions == self._evictions:
            return
        with self._lock:  # one thread
            if now < self._maintained + _EVERY_S and evictions == self._evictions:
                return
            before, self._maintained, self._evictions = int(self._maintained), now, evictions
        mapped = np.flatnonzero(self._present)
        used = self._last_used(mapped) >= before
        names = [item.name(block) for item, some in self._by_object(mapped.tolist()) for block in some]
        gone = [
            not (self.cache.touch(name) if in_use else self.cache.has(name))
            for name, in_use in zip(names, used.tolist(), strict=True)
        ]
        self.retire(mapped[np.array(gone, bool)].tolist())

    def note(self, block: int, present: bool) -> None:
        """A block was mapped, or is to be unmapped. Called with the lock of its object held: no other is taken."""
        with self._counting:
            self.mapped += present - int(self._present[block])
            self._present[block] = present
            self._used_at[block] = _now()

    def present(self) -> tuple[Indices, npt.NDArray[np.int32]]:
        """The blocks that are there, and when each was used last."""
        blocks = np.flatnonzero(self._present)
        return blocks, self._last_used(blocks)

    def _last_used(self, blocks: Indices) -> npt.NDArray[np.int32]:
        return np.maximum(self._used_at[blocks], np.int32(self._complete_at))

    def retire(self, blocks: Sequence[int]) -> None:
        """Later reads do not find these blocks. They are unmapped once the reads before have ended."""
        if not blocks:
            return
        with self._lock:
            self._complete = False
            for item, some in self._by_object(blocks):
                for block in some:
                    item.retire(block)
            self._retired.update(dict.fromkeys(blocks, next(self._numbers)))
            self._unmap()

    def _unmap(self) -> None:
        """Let go of the blocks that no read in progress uses. Called under _lock."""
        oldest = next(iter(self._reads), None)
        ready = [block for block, at in self._retired.items() if oldest is None or at < oldest]
        # under the lock: a block that is fetched and retired again meanwhile has later readers
        with contextlib.suppress(OSError):  # no mapping is free, not even for this: the next read tries again
            for item, some in self._by_object(sorted(ready)):
                for block in some:
                    item.unmap(block)
                    del self._retired[item.first_block + block]


_sources: weakref.WeakSet[Residency] = weakref.WeakSet()
"""Those of this process."""
_making_room = threading.Lock()


@functools.cache
def most_mapped() -> int:
    """How many blocks a process may have mapped. Each may split the addresses around it: two mappings a block."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            allowed = int(file.read())
    except (OSError, ValueError):  # not Linux
        allowed = 65_530
    return max(1 << 10, (allowed - _OTHER_MAPPINGS) // 2)


def _all_sources() -> tuple[Residency, ...]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread opens one: no lock, which a fork might leave held
            return tuple(_sources)


def _make_room() -> None:
    """Retire the blocks of this process that were not read for the longest time, until an eighth is free."""
    if not _making_room.acquire(blocking=False):
        return
    try:
        found = [(source, *source.present()) for source in _all_sources()]
        since = np.concatenate([times for _, _, times in found])
        more = len(since) - int(most_mapped() * _KEPT)
        if more <= 0:
            return
        chosen = np.zeros(len(since), bool)
        chosen[np.argpartition(since, more - 1)[:more]] = True
        first = 0
        for source, blocks, _ in found:
            source.retire(blocks[chosen[first : first + len(blocks)]].tolist())
            first += len(blocks)
    finally:
        _making_room.release()


def _now() -> int:
    return int(time.monotonic())
