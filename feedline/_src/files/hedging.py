"""Hedging: if a request takes much longer than others of its size, it is sent a second time."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from feedline._src.files.fetcher import fetcher

T = TypeVar("T")
_KEPT, _FEWEST = 256, 20  # durations per size: kept at most, and needed at least
_LATE = 1.5  # late after this × the 95th percentile; on a shared link, all take nearly as long as that percentile
_SHARE = 0.1  # the largest share of hedges, so that a store that is slow as a whole does not get twice the load
_SHORTEST_S = 0.02


class Hedging:
    """Sends slow requests twice. Records the durations of requests, by size. For the fetcher's thread only."""

    def __init__(self) -> None:
        self._durations: dict[int, collections.deque[float]] = {}

    async def first(self, size: int, request: Callable[[], Awaitable[T]]) -> T:
        """Send `request`, and send it again if it takes over 1.5 × the 95th percentile of earlier requests of its
        size. Returns the first result. If both fail, raises the later error.
        """
        tasks = [asyncio.ensure_future(self._timed(size, request))]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._late_after_s(size))
            counts = fetcher().counts
            if not done and counts.hedged < _SHARE * counts.requests:
                counts.requests += 1
                counts.hedged += 1
                tasks.append(asyncio.ensure_future(self._timed(size, request)))
            for task in asyncio.as_completed(tasks):
                try:
                    return await task
                except Exception as error:  # noqa: BLE001  # the other request may succeed
                    failure = error
            raise failure
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _timed(self, size: int, request: Callable[[], Awaitable[T]]) -> T:
        began = time.monotonic()
        result = await request()
        durations = self._durations.setdefault(size.bit_length(), collections.deque(maxlen=_KEPT))
        durations.append(time.monotonic() - began)
        return result

    def _late_after_s(self, size: int) -> float | None:
        durations = sorted(self._durations.get(size.bit_length(), ()))
        if len(durations) < _FEWEST:
            return None
        return max(_SHORTEST_S, _LATE * durations[math.ceil(0.95 * len(durations)) - 1])
