"""Compares the places of the processes in the data where they are at the same step, or save to the same folder."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Collection
from typing import Any

from feedline._src.agreement.all_gather import AllGather
from feedline._src.agreement.coordination import (
    Comparison,
    Coordination,
    coordination,
    counted,
    digest,
    group_name,
)
from feedline._src.agreement.monitor import out_of_step

_KEPT = 8  # comparisons of a process that stay: a process that is further behind is not compared
_saving = threading.Lock()


class StepPlaces:
    """Compares places at equal steps of a loop ("fit", "checkpoints"), which collectives keep equal."""

    def __init__(self, loop: str, processes: Collection[int]) -> None:
        members = sorted(set(processes))
        self._processes = len(members)
        self._service = coordination() if len(members) > 1 else None
        if self._service is not None:
            self._path = counted(loop, members)
            self._comparison = Comparison(self._service, _KEPT)

    def compare(self, step: int, epoch: int, position: int) -> None:
        """End all processes with a `ProcessError` if another one is at another place at this step."""
        if self._service is not None:
            where = f"at step {step} of training"
            _compare(self._comparison, f"{self._path}/{step}", where, self._service.process, [epoch, position])

    def gather(self, name: str, value: Any) -> list[Any]:
        """Wait for the JSON values of all processes under this name, and return those that differ."""
        if self._service is None:
            return [value]
        gathered = AllGather(self._service, self._path, self._processes, kept=1)
        return gathered(name, value, False, lambda: False)


def compare_save(processes: Collection[int], folder: str | os.PathLike[str], epoch: int, position: int) -> None:
    """Compare the place of lanes that are saved to a folder with the one that another process saves there.

    Saves are told apart by their folder and not by a number: threads may save in any order. Only the first save of
    a process to a folder is compared, since a process that saves there again may be ahead of another one.
    A difference is a `ProcessError`, with which all processes end.
    """
    service, group, path = coordination(), sorted(set(processes)), os.path.abspath(folder)
    if service is None or len(group) < 2 or service.process not in group:
        return
    with _saving:
        folders, comparison = _saves(service)
        if path in folders:
            return
        folders.add(path)
    key = f"feedline/lanes/{group_name(group)}/{digest(path)}"
    where = f"in the lanes that are saved to {path}"
    _compare(comparison, key, where, service.process, [epoch, position])


@functools.cache
def _saves(service: Coordination) -> tuple[set[str], Comparison]:
    """The folders to which this process has saved lanes."""
    return set(), Comparison(service, _KEPT)


def _compare(comparison: Comparison, key: str, where: str, process: int, place: list[int]) -> None:
    if found := comparison.differing(key, place):
        raise out_of_step(
            f"the processes are out of step: {where}, {_placed(*found)}, and {_placed(process, place)}; look for "
            "a next, seek or set_state that not all processes reach, as under `if jax.process_index() == 0`"
        )


def _placed(process: int, place: list[int]) -> str:
    return f"the feed of process {process} is at epoch {place[0]}, position {place[1]}"
