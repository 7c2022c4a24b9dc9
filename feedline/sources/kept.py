"""A cache of what was costly to read, in bounded memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Held = TypeVar("Held", bound=_Sized)


@dataclasses.dataclass
class _Entry(Generic[Held]):
    lock: threading.Lock
    held: Held | None = None


class Kept(Generic[Held]):
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
        self._entries: dict[Hashable, _Entry[Held]] = {}
        """Oldest use first; those that hold nothing are being read. Held by _lock."""
        self._bytes = 0
        """Of what _entries hold. Held by _lock."""

    def get(self, key: Hashable, read: Callable[[], Held]) -> Held:
        """What belongs to `key`, by `read` if it is not kept. What `read` raises is raised, and nothing kept."""
        with self._lock:
            entry = self._entries.pop(key, None) or _Entry(threading.Lock())
            self._entries[key] = entry
        with entry.lock:
            if entry.held is None:
                self._keep(key, entry, read())
            assert entry.held is not None
            return entry.held

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _keep(self, key: Hashable, entry: _Entry[Held], held: Held) -> None:
        """Hold on to what has been read, and let go of what was not used for longest."""
        with self._lock:
            entry.held = held
            if self._entries.get(key) is not entry:
                return  # cleared meanwhile
            self._bytes += held.nbytes
            for old, other in list(self._entries.items()):
                if self._bytes <= self._limit_bytes:
                    return
                if other.held is not None and other is not entry:
                    del self._entries[old]
                    self._bytes -= other.held.nbytes
