"""Compares the places of the processes in the data where they are at the same step, or save to the same folder.

No comparison waits: of two processes, the first publishes its place, and the later one compares its own.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import threading
from collections.abc import Collection
from typing import Any

from feedline._src.agreement.agree import group_name
from feedline._src.agreement.all_gather import AllGather
from feedline._src.agreement.coordination import Coordination, coordination
from feedline._src.agreement.monitor import out_of_step

_KEPT = 8
"""Comparisons of a process that stay in the service: a process that is further behind is not compared."""
_loops: collections.Counter[str] = collections.Counter()
"""How many loops this process has begun with which others. All of them begin theirs in the same order."""
_saved_to: set[str] = set()
"""Keys of the folders to which this process has saved lanes, held by `_saving`."""
_published_saves: collections.deque[str] = collections.deque()
"""Those of them under which this process has published its place, held by `_saving`."""
_saving = threading.Lock()


class StepPlaces:
    """Compares places at equal steps, which collectives keep equal.

    Args:
      loop: what is compared, as a part of keys: "fit", "checkpoints".
      processes: those that run the loop. They do not wait for each other. One alone compares nothing.
    """

    def __init__(self, loop: str, processes: Collection[int]) -> None:
        service = coordination()
        self._service = service if service is not None and len(set(processes)) > 1 else None
        self._processes = len(set(processes))
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
        key = f"{self._path}/{step}"
        if _compare(self._service, key, epoch, position, f"at step {step} of training"):
            self._published.append(key)
            if len(self._published) > _KEPT:
                self._service.delete(self._published.popleft())

    def gather(self, name: str, value: Any) -> list[Any]:
        """Wait for the JSON values of all processes, and return those that differ, in the order of the processes.

        Args:
          name: what is gathered, once, as a part of keys.

        Raises:
          ProcessError: another process failed meanwhile.
        """
        if self._service is None:
            return [value]
        gathered = AllGather(self._service, self._path, self._processes, kept=1)
        return gathered(name, value, False, lambda: False)


def compare_save(processes: Collection[int], folder: str | os.PathLike[str], epoch: int, position: int) -> None:
    """Compare the place of lanes that are saved to a folder with the one that another process saves there.

    Saves are told apart by their folder and not by a number: threads may save in any order. Only the first save of
    a process to a folder is compared, since a process that saves there again may be ahead of another one.

    Args:
      processes: those that save lanes together.
      folder: a process that has another path to it is not compared.

    Raises:
      ProcessError: another process saves another place. All processes end with this message.
    """
    service, group = coordination(), sorted(set(processes))
    if service is None or len(group) < 2 or service.process not in group:
        return
    path = os.path.abspath(folder)
    key = f"feedline/lanes/{group_name(group)}/{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}"
    with _saving:
        if key in _saved_to:
            return
        _saved_to.add(key)
    if _compare(service, key, epoch, position, f"in the lanes that are saved to {path}"):
        with _saving:
            _published_saves.append(key)
            expired = _published_saves.popleft() if len(_published_saves) > _KEPT else None
        if expired is not None:
            service.delete(expired)


def _compare(service: Coordination, key: str, epoch: int, position: int, when: str) -> bool:
    """Publish the place of this process under a key, or compare it with what another process has published.

    Returns:
      whether this process has published its own.
    """
    own = [service.process, epoch, position]
    if service.set(key, json.dumps(own)):
        return True
    if (found := service.try_get(key)) is not None and json.loads(found)[1:] != own[1:]:
        raise out_of_step(
            f"the processes are out of step: {when}, {_placed(*json.loads(found))}, and {_placed(*own)}; look for "
            "a next, seek or set_state that not all processes reach, as under `if jax.process_index() == 0`"
        )
    return False


def _placed(process: int, epoch: int, position: int) -> str:
    return f"the feed of process {process} is at epoch {epoch}, position {position}"
