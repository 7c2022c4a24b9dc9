"""The limit on worker processes that a feed replaces."""

from __future__ import annotations

import logging

from feedline._src.errors import WorkerError

_log = logging.getLogger("feedline")


class Restarts:
    """Counts the replaced workers of a feed, and allows at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit

    @property
    def left(self) -> bool:
        return self.count < self._limit

    def use(self, error: WorkerError) -> None:
        """Count a worker that will be replaced, and log why it ended. Raises `error` if no restart is left."""
        if not self.left:
            if self._limit:
                error.add_note(
                    f"feedline: Reading(restart={self._limit}) has replaced {self.count} workers of this feed "
                    "already; find what ends them, or raise restart"
                )
            raise error
        self.count += 1
        _log.warning("%s. It is replaced (restart %d of %d)", error.message, self.count, self._limit)
