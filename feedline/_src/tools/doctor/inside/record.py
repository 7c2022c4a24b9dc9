"""What was observed in this process, and the file to which it is written."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

_MOST_FUNCTIONS = 200
_WRITE_EVERY_S = 5.0


class Observed(Protocol):
    """A part of what is observed."""

    def as_object(self) -> dict[str, Any]:
        """JSON values."""


class Called(Observed, Protocol):
    """A compiled function."""

    def is_older(self, array: Any) -> bool:
        """Whether an earlier call than the last returned this array."""


class Record:
    """Counts of one process. Used by the main thread only: hooks do nothing on others.

    Attributes:
      folder: where the file is written.
      moves: (kind, what, line) → [count, bytes, seconds] of transfers and waits on the main thread. Kinds are "to
        host", "to device" and "wait". Seconds are 0 where a transfer is a part of a longer call.
      compilations: (line, function) → [count, seconds] of programs compiled outside of watched functions,
        once a loop has begun.
      pmaps: line → calls of functions that were mapped there.
      functions: compiled functions that were called, the first 200.
      jitted: (line, function) → how many functions were compiled that were made there.
      compiled: programs compiled by the main thread so far; `compile_s` their seconds.
      looped: whether some function was called so often that it is a step of a loop.
      inside_call: whether a watched function is being called on the main thread.
      parts: further parts of the file, by name.
      on_first_array: called with the first array that a compiled function returns. Before that the doctor may make
        no array, because jax.distributed.initialize may still be to come.
      last: the function that was called last.
      failures: what the hooks themselves failed at: where → why.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.moves: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self.compilations: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
        self.pmaps: dict[str, int] = defaultdict(int)
        self.functions: list[Observed] = []
        self.jitted: dict[tuple[str, str], int] = defaultdict(int)
        self.compiled, self.compile_s = 0, 0.0
        self.looped = self.inside_call = False
        self.parts: dict[str, Observed] = {}
        self.on_first_array: Callable[[Any], None] | None = None
        self.last: Called | None = None
        self.failures: dict[str, str] = {}
        self._process = os.getpid()
        self._began = self._written = time.time()

    def moved(self, kind: str, what: str, line: str, size: int, seconds: float) -> None:
        """Count a transfer or a wait."""
        found = self.moves[kind, what, line]
        found[0] += 1
        found[1] += size
        found[2] += seconds

    def is_older(self, arrays: list[Any]) -> bool:
        """Whether all these arrays are results of steps before the last one."""
        return self.last is not None and all(map(self.last.is_older, arrays))

    def met(self, array: Any) -> None:
        """Take note of an array."""
        if self.on_first_array is not None:
            self.on_first_array(array)
            self.on_first_array = None

    @contextlib.contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """For the doctor's own work beside a call of the job: an exception in it is noted, and the job goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  reported as something that could not be checked
            self.failures[where] = f"{type(error).__name__}: {error}"

    def add(self, function: Observed) -> None:
        """Keep a compiled function that was called."""
        if len(self.functions) < _MOST_FUNCTIONS:
            self.functions.append(function)

    def write(self) -> None:
        """Replace the file of this process. Nothing is written by a process that was forked from this one."""
        if os.getpid() != self._process:
            return
        self._written = time.time()
        partial = self.folder / f"{self._process}.partial"
        with contextlib.suppress(OSError):  # the doctor has ended and removed the folder, or the disk is full
            partial.write_text(json.dumps(self.as_object()))
            os.replace(partial, self.folder / f"{self._process}.json")

    def write_now_and_then(self) -> None:
        """Write if some seconds have passed: a process that is killed writes nothing at its end."""
        if time.time() - self._written > _WRITE_EVERY_S:
            self.write()

    def as_object(self) -> dict[str, Any]:
        """All that was observed, as JSON values."""
        return {
            "process": self._process,
            "failures": self.failures,
            "seconds": time.time() - self._began,
            "moves": [
                {"kind": kind, "what": what, "line": line, "count": count, "bytes": size, "seconds": seconds}
                for (kind, what, line), (count, size, seconds) in list(self.moves.items())
            ],
            "compilations": [
                {"line": line, "function": function, "count": count, "seconds": seconds}
                for (line, function), (count, seconds) in list(self.compilations.items())
            ],
            "pmaps": dict(list(self.pmaps.items())),
            "jitted": [
                {"line": line, "function": function, "count": count}
                for (line, function), count in list(self.jitted.items())
            ],
            "functions": [function.as_object() for function in list(self.functions)],
            **{name: part.as_object() for name, part in list(self.parts.items())},
        }


def on_main_thread() -> bool:
    """Whether the caller runs on the main thread, which is taken for the training thread."""
    return threading.current_thread() is threading.main_thread()
