"""What is fetched before a batch needs it: as much as keeps the link busy, and as the cache holds until then."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from feedline._src.files.fetcher import AT_ONCE, fetcher

AHEAD = 0.25
"""The share of the cache that batches fill which were fetched and not read yet."""
MOST = 2 * AT_ONCE
"""Requests that wait or are under way."""

Request = concurrent.futures.Future[None]


class Ahead:
    """Requests whose results are put into the cache. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[Hashable, Request] = {}
        """Guarded by _lock."""

    def is_too_early(self, needed_bytes: int, ahead: int, limit_bytes: int) -> bool:
        """Whether what is needed `ahead` batches later should not be fetched yet.

        Args:
          needed_bytes: of a batch.
          limit_bytes: what all batches until then have room in.
        """
        return (ahead + 1) * needed_bytes > limit_bytes * AHEAD or len(self._pending) >= MOST

    def fetch(
        self,
        key: Hashable,
        request: Callable[[], Coroutine[Any, Any, None]],
        done: Callable[[], None] | None = None,
    ) -> None:
        """Start a request, unless one for this key is under way.

        Args:
          done: is called once it has succeeded, and before it is forgotten.
        """
        with self._lock:
            if self.get(key) is not None:
                return
            future = self._pending[key] = fetcher().run(request())
        future.add_done_callback(functools.partial(self._forget, key, done))

    def get(self, key: Hashable) -> Request | None:
        """The request for a key; None: none is under way."""
        found = self._pending.get(key)
        # one that is done may still be there, also for ever, after an interrupt
        return None if found is None or found.done() else found

    def close(self) -> None:
        """Give up what is being fetched."""
        with self._lock:
            futures = list(self._pending.values())
        for future in futures:
            future.cancel()

    def _forget(self, key: Hashable, done: Callable[[], None] | None, future: Request) -> None:
        if done is not None and not future.cancelled() and future.exception() is None:
            done()
        with self._lock:
            if self._pending.get(key) is future:
                del self._pending[key]
