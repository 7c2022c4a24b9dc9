"""An LRU cache of arrays in bounded memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=_Sized)


@dataclasses.dataclass
class _Entry(Generic[Value]):
    lock: threading.Lock
    value: Value | None = None


class LruCache(Generic[Value]):
    """The most recently used values, of at most `limit_bytes` in total, or a single larger one.

    Thread-safe: threads that ask for the same key at the same time read its value once.

    Example:
      >>> import numpy as np
      >>> cache = LruCache(limit_bytes=1000)
      >>> cache.get("a", lambda: np.zeros(500, np.uint8)).nbytes
      500
      >>> cache.get("a", lambda: 1 / 0).nbytes  # cached: the function is not called
      500
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry[Value]] = {}
        """Least recently used first. An entry without a value is being read. Guarded by _lock."""
        self._bytes = 0
        """The size of all values in _entries. Guarded by _lock."""

    def get(self, key: Hashable, read: Callable[[], Value]) -> Value:
        """The value of `key`: the cached one, else what `read` returns. An exception of `read` is not cached."""
        with self._lock:
            entry = self._entries.pop(key, None) or _Entry(threading.Lock())
            self._entries[key] = entry
        with entry.lock:
            if entry.value is None:
                self._store(key, entry, read())
            assert entry.value is not None
            return entry.value

    def discard(self, key: Hashable, value: Value) -> None:
        """Drop a value, unless the key has another one by now."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.value is value:
                del self._entries[key]
                self._bytes -= value.nbytes

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _store(self, key: Hashable, entry: _Entry[Value], value: Value) -> None:
        """Cache a value that has been read, and evict the least recently used ones beyond the limit."""
        with self._lock:
            entry.value = value
            if self._entries.get(key) is not entry:
                return  # the cache was cleared meanwhile
            self._bytes += value.nbytes
            for old, other in list(self._entries.items()):
                if self._bytes <= self._limit_bytes:
                    return
                if other.value is not None and other is not entry:
                    del self._entries[old]
                    self._bytes -= other.value.nbytes
