"""Whether all processes are at the same place of the data when they are at the same step of a training loop."""

from __future__ import annotations

import collections
import json
from collections.abc import Collection

from feedline._src.agreement.agree import group_name
from feedline._src.agreement.coordination import coordination
from feedline._src.agreement.monitor import out_of_step

_KEPT = 8
"""Comparisons of a process that stay in the service: a process that is further behind is not compared."""
_loops: collections.Counter[str] = collections.Counter()
"""How many loops this process has begun with which others. All of them begin theirs in the same order."""


class StepPlaces:
    """Compares places at equal steps, which collectives keep equal. The first process publishes its own.

    Args:
      loop: what is compared, as a part of keys: "fit", "checkpoints".
      processes: those that run the loop. They do not wait for each other. One alone compares nothing.
    """

    def __init__(self, loop: str, processes: Collection[int]) -> None:
        service = coordination()
        self._service = service if service is not None and len(set(processes)) > 1 else None
        name = f"feedline/{loop}/{group_name(sorted(set(processes)))}"
        _loops[name] += self._service is not None
        self._path = f"{name}/{_loops[name]}"
        self._published: collections.deque[str] = collections.deque()

    def compare(self, step: int, epoch: int, position: int) -> None:
        """Compare the place at a step, by two calls of the service.

        Raises:
          ProcessError: another process is at another place. All processes end with this message.
        """
        if self._service is None:
            return
        key, own = f"{self._path}/{step}", [self._service.process, epoch, position]
        if self._service.set(key, json.dumps(own)):
            self._published.append(key)
            if len(self._published) > _KEPT:
                self._service.delete(self._published.popleft())
        elif (found := self._service.try_get(key)) is not None and json.loads(found)[1:] != own[1:]:
            raise out_of_step(
                f"the processes are out of step: at step {step} of training, {_placed(*json.loads(found))}, and "
                f"{_placed(*own)}; look for a next, seek or set_state that not all processes reach, as under "
                "`if jax.process_index() == 0`"
            )


def _placed(process: int, epoch: int, position: int) -> str:
    return f"the feed of process {process} is at epoch {epoch}, position {position}"
