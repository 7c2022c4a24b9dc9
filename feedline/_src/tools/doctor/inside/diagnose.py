"""Diagnoses the first feed that a loop takes batches from, in each process of a command."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from feedline._src.agreement.coordination import coordination
from feedline._src.building import building
from feedline._src.errors import ProcessError

if TYPE_CHECKING:
    from feedline._src.feed import Feed

_WAIT_S = 10.0  # how long a process waits for others that are behind
_PROCESS_0_S = 0.2  # how long process 0, which holds the coordination service, lets the others exit
_KEYS = "feedline/diagnosed"


def start(folder: str) -> None:
    """Diagnose a feed of this process.

    Args:
      folder: where the diagnosis is written. Its "given.txt" has the batches to take before, and those of the
        diagnosis, as "8 200".
    """
    before, steps = (int(number) for number in Path(folder, "given.txt").read_text().split())
    loop = _Loop(Path(folder), before, steps)
    atexit.register(loop.left)
    loop.watching.enter_context(building(asked=loop.asked))  # for good


class _Loop:
    """Waits for a feed that delivered `before` batches, diagnoses it, and ends the process.

    The process ends by `os._exit`: the model was trained on repeated batches, and must not be saved. Processes of
    one run end together.
    """

    def __init__(self, folder: Path, before: int, steps: int) -> None:
        self._folder, self._before, self._steps = folder, before, steps
        self._counts: weakref.WeakKeyDictionary[Feed, int] = weakref.WeakKeyDictionary()
        self._feed: Feed | None = None
        self._context: contextlib.ExitStack | None = None
        self.watching = contextlib.ExitStack()

    def asked(self, feed: Feed) -> None:
        """A batch of this feed is asked for."""
        if self._feed is not None:
            return
        count = self._counts[feed] = self._counts.get(feed, 0) + 1
        if count > self._before:
            self._feed, self._context = feed, contextlib.ExitStack()
            self._diagnosis = self._context.enter_context(feed.diagnose(self._steps, over=self._over))

    def _over(self) -> None:
        """All phases are over."""
        self.left()
        sys.stdout.flush()
        sys.stderr.flush()
        _await_others()
        os._exit(0)

    def left(self) -> None:
        """The loop takes no more batches."""
        context, self._context = self._context, None
        if context is not None:
            context.close()
            partial = self._folder / f"{os.getpid()}.partial"
            partial.write_text(json.dumps(self._diagnosis.to_dict()))
            os.replace(partial, self._folder / f"{os.getpid()}.json")


def _await_others() -> None:
    """Wait for the diagnoses of the other processes of a run, and in process 0 for the others' ends.

    jax ends all processes once process 0 has ended. A process whose loop ended earlier is waited for in vain, so
    there is a limit.
    """
    service = coordination()
    if service is None:
        return
    deadline = time.monotonic() + _WAIT_S
    with contextlib.suppress(TimeoutError, ProcessError):  # another process has failed, or left its loop earlier
        service.set(f"{_KEYS}/written/{service.process}", "")
        for process in range(service.processes):
            service.get(f"{_KEYS}/written/{process}", deadline - time.monotonic())
    with contextlib.suppress(TimeoutError, ProcessError):
        if service.process:
            service.set(f"{_KEYS}/left/{service.process}", "")
            return
        for process in range(1, service.processes):
            service.get(f"{_KEYS}/left/{process}", deadline - time.monotonic())
        time.sleep(_PROCESS_0_S)
