"""Runs in each process of a command that imports jax: begins to observe the job, or diagnoses a feed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedline._src.feed import Feed

NOT_OBSERVED = "not_observed.txt"


def begin(folder: str, task: str) -> None:
    """Begin the task, after jax is imported and before a device is used. Results are written into the folder.

    The task is "observe", or "diagnose 8 200": a diagnosis of 200 batches, after the first 8 batches.
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
    """Waits until a feed has delivered `before` batches, diagnoses it, and ends the process.

    The process ends by `os._exit`, because the model was trained on repeated batches and must not be saved. The
    processes of one run end together.
    """

    def __init__(self, folder: Path, before: int, steps: int) -> None:
        from feedline._src.feed_options import building

        self._folder, self._before, self._steps = folder, before, steps
        self._diagnosis: Any = None
        self._most_asked = 0  # the most batches that any feed was asked for
        self._contexts = contextlib.ExitStack()
        self._contexts.enter_context(building(asked=self._asked))
        atexit.register(self._write)

    def _asked(self, feed: Feed) -> None:
        if self._diagnosis is not None:
            return
        batches = feed.statistics().batches
        if _is_over(feed, batches):
            return
        self._most_asked = max(self._most_asked, batches + 1)
        if batches >= self._before:
            self._diagnosis = self._contexts.enter_context(feed.diagnose(self._steps, over=self._end))

    def _end(self) -> None:
        """End the process, even after an error such as a closed output: the program must not continue and save."""
        code = 1
        try:
            self._write()
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            _await_others()
            code = 0
        except BaseException:  # noqa: BLE001  the process ends in any case
            traceback.print_exc()
        finally:
            os._exit(code)

    def _write(self) -> None:
        """Write the diagnosis, or why there is none. Called at the end of the diagnosis or of the process."""
        if self._diagnosis is not None:
            self._contexts.close()
            write(self._folder, self._diagnosis.to_dict())
        else:
            text = f"at most {self._most_asked} were asked for" if self._most_asked else "none was asked for"
            (self._folder / NOT_OBSERVED).write_text(text)


def _is_over(feed: Feed, batches: int) -> bool:
    """Whether a pass ends after this number of batches. False if the length of a pass is unknown."""
    try:
        # position > 0: the next pass has not begun
        return batches > 0 and feed.position > 0 and batches % (len(feed) * feed.steps_per_call) == 0
    except TypeError:
        return False


def _await_others() -> None:
    """Wait for the other processes of a run, because jax ends all of them once process 0 has ended."""
    import jax

    try:
        jax.distributed.shutdown()
    except RuntimeError as error:  # another process has failed
        print(f"feedline diagnose: {error}", file=sys.stderr, flush=True)
