"""Checks that processes at the same step of a loop are at the same place in the data."""

from __future__ import annotations

from collections.abc import Collection

from feedline._src.agreement.coordination import Comparison, coordination, counted
from feedline._src.agreement.monitor import out_of_step

_KEPT = 8  # how many comparisons the service keeps; a process that is further behind is not compared


class StepPlaces:
    """Compares processes' places at each step of a loop such as "fit". Collectives keep the step numbers equal."""

    def __init__(self, loop: str, processes: Collection[int]) -> None:
        members = sorted(set(processes))
        self._service = coordination() if len(members) > 1 else None
        if self._service is not None:
            self._path = counted(loop, members)
            self._comparison = Comparison(self._service, _KEPT)

    def compare(self, step: int, epoch: int, position: int) -> None:
        """End all processes with a `ProcessError` if another process is at another place at this step."""
        if self._service is None:
            return
        place = [epoch, position]
        if found := self._comparison.differing(f"{self._path}/{step}", place):
            raise out_of_step(
                f"the processes are out of step: at step {step} of training, {_placed(*found)}, and "
                f"{_placed(self._service.process, place)}; look for a next, seek or set_state that not all "
                "processes reach, as under `if jax.process_index() == 0`"
            )


def _placed(process: int, place: list[int]) -> str:
    return f"the feed of process {process} is at epoch {place[0]}, position {place[1]}"
