"""A value that each process replaces now and then, and that all others can read, without waiting for anybody."""

from __future__ import annotations

from feedline._src.agreement.coordination import Coordination


class LatestValues:
    """One string a process. Any thread may call it; a call takes about 0.3 ms.

    Args:
      key: a path for keys of the feed, the same in every process.
    """

    def __init__(self, service: Coordination, key: str) -> None:
        self._service = service
        self._key = f"{key}/latest"

    def publish(self, value: str) -> None:
        """Replace this process's value. ProcessError if process 0 cannot be reached."""
        self._service.replace(f"{self._key}/{self._service.process}", value)

    def read(self) -> dict[int, str]:
        """The latest value of each process that has published one. ProcessError as above."""
        return self._service.by_process(self._key)
