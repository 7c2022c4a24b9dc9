"""What runs in each process of a command that imports jax: it begins to observe the job, or diagnoses its feed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedline._src.feed import Feed

NOT_OBSERVED = "not_observed.txt"


def begin(folder: str, task: str) -> None:
    """Called once jax has been imported, before a device is used. Results are written into the folder.

    The task is "observe", or "diagnose 8 200" with the batches to take before, and those of the diagnosis.
    """
    kind, *numbers = task.split()
    if kind == "observe":
        from feedline._src.tools.doctor.observe import Record, install

        install(Record(functools.partial(write, Path(folder))))
    else:
        _Diagnosing(Path(folder), *map(int, numbers))


def write(folder: Path, result: Any) -> None:
    """Replace this process's file with a result, a JSON value."""
    partial = folder / f"{os.getpid()}.partial"
    partial.write_text(json.dumps(result))
    os.replace(partial, partial.with_suffix(".json"))


class _Diagnosing:
    """Waits for a feed that delivered `before` batches, diagnoses it, and ends the process.

    The process ends by `os._exit`: the model was trained on repeated batches, and must not be saved. Processes of
    one run end together.
    """

    def __init__(self, folder: Path, before: int, steps: int) -> None:
        from feedline._src.feed_options import building

        self._folder, self._before, self._steps = folder, before, steps
        self._diagnosis: Any = None
        self._most_batches = 0  # that a feed has delivered
        self._contexts = contextlib.ExitStack()
        self._contexts.enter_context(building(asked=self._asked))
        atexit.register(self._write)

    def _asked(self, feed: Feed) -> None:
        if self._diagnosis is not None:
            return
        self._most_batches = max(self._most_batches, feed.statistics().batches)
        if self._most_batches >= self._before:
            self._diagnosis = self._contexts.enter_context(feed.diagnose(self._steps, over=self._end))

    def _end(self) -> None:
        self._write()
        sys.stdout.flush()
        sys.stderr.flush()
        _await_others()
        os._exit(0)

    def _write(self) -> None:
        """The loop takes no more batches."""
        if self._diagnosis is not None:
            self._contexts.close()
            write(self._folder, self._diagnosis.to_dict())
        else:
            text = f"the longest took {self._most_batches}" if self._most_batches else "none took any"
            (self._folder / NOT_OBSERVED).write_text(text)


def _await_others() -> None:
    """Wait for the other processes of a run: jax ends all of them once process 0 has ended."""
    import jax

    try:
        jax.distributed.shutdown()
    except RuntimeError as error:  # another process has failed
        print(f"feedline diagnose: {error}", file=sys.stderr, flush=True)
