"""An all-gather over the coordination service: every process contributes a value, and receives all values."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

from feedline._src.agreement.coordination import Coordination, coordination, length_of_waits_s
from feedline._src.agreement.monitor import poll_failure
from feedline._src.errors import FeedError

_SLICE_S = 0.5  # length of one wait: a wait in jax cannot be woken, so `stopped` is called between two waits


class AllGather:
    """Gathers a JSON value from each of `processes` processes, in named rounds. It keeps the last `kept` rounds.

    The value that a process contributes must depend only on the round. So a process may repeat earlier rounds,
    after an interrupt or a `seek`, and receives the values that were gathered the first time. After an interrupt,
    threads of the old and the new pipeline may call at once. Of several equal values, one is published.
    """

    def __init__(self, service: Coordination, key: str, processes: int, kept: int) -> None:
        self._service = service
        self._processes = processes
        self._max_kept = kept
        self._path = f"{key}/gather"
        self._failed_tries: collections.Counter[str] = collections.Counter()
        self._kept: collections.deque[str] = collections.deque()

    @classmethod
    def connect(cls, key: str | None, processes: int, kept: int) -> AllGather:
        """Create an all-gather. ValueError: this process has not joined jax's coordination service."""
        service = coordination()
        if service is None or key is None:
            raise ValueError(
                "several processes use jax's coordination service to agree where lanes end, and this process has "
                "not joined it; call feedline.cluster.initialize() before anything else of jax"
            )
        return cls(service, key, processes, kept)

    def __call__(self, name: str, value: Any, failed: bool, stopped: Callable[[], bool], /) -> list[Any]:
        """Wait for the values of all processes, and return the distinct ones, in the order of the processes.

        Args:
          name: the name of the round: a path, e.g. "0/12".
          failed: whether this process failed in the round. If any process did, the round's next call gathers anew.
          stopped: returns whether to stop waiting and raise a `FeedError`.
        """
        tries = self._failed_tries[name]
        key, own = f"{self._path}/{name}/{tries}", json.dumps([failed, value])
        repeats = not self._contribute(key, own)
        slice_s = length_of_waits_s(self._processes, _SLICE_S)
        while True:
            try:
                gathered = json.loads(self._service.get(f"{key}/all", slice_s))
                break
            except TimeoutError:
                if (failure := poll_failure()) is not None:
                    raise failure from None
                # another process that repeats rounds may have deleted this round as expired
                repeats |= self._contribute(key, own)
                if repeats:  # an interrupt may have kept a process from incrementing the counter, or publishing
                    self._publish(key)
                if stopped():
                    raise FeedError("the wait for the other processes was given up", stage="agree") from None
        if any(failed for failed, _ in gathered):
            self._failed_tries[name] = tries + 1
        return [value for _, value in gathered]

    def _contribute(self, key: str, own: str) -> bool:
        """Set this process's value. If it is the last to arrive, publish all values. False: it was already set."""
        if not self._service.set(f"{key}/value/{self._service.process}", own):
            return False
        self._kept.append(key)
        expired = self._kept.popleft() if len(self._kept) > self._max_kept else None
        if self._service.increment(f"{key}/arrived") == self._processes:
            self._publish(key)
            if expired is not None:
                self._service.delete(expired)
        return True

    def _publish(self, key: str) -> None:
        """Publish the distinct values together, under one key, if all processes have set theirs."""
        values = self._service.by_process(f"{key}/value")
        if len(values) == self._processes:
            different = dict.fromkeys(values[process] for process in sorted(values))
            self._service.set(f"{key}/all", f"[{','.join(different)}]")
