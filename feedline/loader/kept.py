"""Arrays that were costly to read, kept for the next reads in bounded memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclasses.dataclass
class _Entry:
    lock: threading.Lock
    array: Array | None = None


class Kept:
    """The arrays that were used last, of at most `limit_bytes` together, or one that is larger.

    For many threads: those that ask for one array read it once.

    Example:
      >>> import numpy as np
      >>> kept = Kept(limit_bytes=1000)
      >>> kept.get("a", lambda: np.zeros(500, np.uint8)).nbytes
      500
      >>> kept.get("a", lambda: 1 / 0).nbytes  # it is there
      500
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}
        """Oldest use first; those without an array are being read. Held by _lock."""
        self._bytes = 0
        """Of the arrays in _entries. Held by _lock."""

    def get(self, key: Hashable, read: Callable[[], Array]) -> Array:
        """The array of `key`, by `read` if it is not kept. What `read` raises is raised, and nothing kept."""
        with self._lock:
            entry = self._entries.pop(key, None) or _Entry(threading.Lock())
            self._entries[key] = entry
        with entry.lock:
            if entry.array is None:
                self._keep(key, entry, read())
            assert entry.array is not None
            return entry.array

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _keep(self, key: Hashable, entry: _Entry, array: Array) -> None:
        """Hold on to an array that has been read, and let go of those that were not used for longest."""
        with self._lock:
            entry.array = array
            if self._entries.get(key) is not entry:
                return  # cleared meanwhile
            self._bytes += array.nbytes
            for old, held in list(self._entries.items()):
                if self._bytes <= self._limit_bytes:
                    return
                if held.array is not None and held is not entry:
                    del self._entries[old]
                    self._bytes -= held.array.nbytes
