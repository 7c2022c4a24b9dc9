"""What the processes have to say about a place in a run, put together for all of them."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

from feedline.agreement.coordination import Coordination, coordination
from feedline.agreement.monitor import failure_meanwhile
from feedline.errors import FeedError

_LOOK_UP_S = 0.5
"""How often a wait looks whether it was given up: jax's own cannot be woken."""


class Gather:
    """Called on every one of `processes` processes, by the thread of a run, and perhaps by that of one given up.

    What a process says must follow from the place alone. Then a process may come to a place again,
    after an interrupt or a `seek`, while the others went on: it is told what was put together there.

    Args:
      coordination: the service.
      key: a path that is theirs alone.
      processes: how many of its processes take part.
      kept: places whose keys stay in the service: more than a process that begins again can be behind the others.
    """

    def __init__(self, coordination: Coordination, key: str, processes: int, kept: int) -> None:
        self._service = coordination
        self._processes = processes
        self._most_kept = kept
        self._root = f"{key}/gather"
        self._tries: collections.Counter[str] = collections.Counter()
        self._kept: collections.deque[str] = collections.deque()

    @classmethod
    def joined(cls, key: str | None, processes: int, kept: int) -> Gather:
        """Over the service that this process has joined.

        Raises:
          ValueError: it has joined none.
        """
        service = coordination()
        if service is None or key is None:
            raise ValueError(
                "several processes agree on the end of lanes over jax's coordination service, and this one has "
                "not joined it; call feedline.cluster.initialize() before anything else of jax"
            )
        return cls(service, key, processes, kept)

    def __call__(self, place: str, said: Any, failed: bool, stopped: Callable[[], bool]) -> list[Any]:
        """What each process says of `place`, in the order of the processes, once the last one has said it.

        Args:
          place: a path, e.g. "0/12".
          said: JSON values.
          failed: whether this process failed here. If one did, the next that is said of the place counts anew.
          stopped: whether to give up waiting.

        Raises:
          ProcessError: another process failed meanwhile, or process 0 cannot be reached.
          FeedError: `stopped`.
        """
        tries = self._tries[place]
        key = f"{self._root}/{place}/{tries}"
        first = self._service.set(f"{key}/said/{self._service.process:06}", json.dumps([failed, said]))
        if first:
            self._kept.append(key)
            left = self._kept.popleft() if len(self._kept) > self._most_kept else None
            if self._service.increment(f"{key}/count") == self._processes:
                self._conclude(key, left)
        while True:
            try:
                told = json.loads(self._service.get(f"{key}/all", _LOOK_UP_S))
                break
            except TimeoutError:
                if (why := failure_meanwhile()) is not None:
                    raise why from None
                # this process comes again: an interrupt may have kept it from counting itself, or from concluding
                if not first and len(self._service.dir(f"{key}/said/")) == self._processes:
                    self._conclude(key, None)
                if stopped():
                    raise FeedError("the wait for the other processes was given up", stage="agree") from None
        if any(failed for failed, _ in told):
            self._tries[place] = tries + 1
        return [said for _, said in told]

    def _conclude(self, key: str, left: str | None) -> None:
        """The last one to come puts together what all said, and clears a place that all have left."""
        said = self._service.dir(f"{key}/said/")
        self._service.set(f"{key}/all", f"[{','.join(said[name] for name in sorted(said))}]")
        if left is not None:
            self._service.delete(f"{left}/")
