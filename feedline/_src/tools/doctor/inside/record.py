"""What was observed in this process, and the file to which it is written."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from feedline._src.tools.doctor.inside.loop import Loop


class Record:
    """Counts of one process. The main thread fills it; the sampler's thread reads it when it writes the file.

    Attributes:
      functions: compiled functions by name and the line where they were made.
      operations: (line, name) → [count, seconds] of programs that were compiled outside of these functions, once a
        loop had begun.
      compiled, compile_s: programs that the main thread has compiled so far, and their seconds.
      inside_call: whether the main thread is calling a compiled function.
      last: two of the arrays that the last call of a compiled function returned.
      loop: what is observed of the loop; None before it begins.
      failures: what the hooks themselves failed at: where → why.
    """

    def __init__(self, folder: Path) -> None:
        self.functions: dict[tuple[str, str], Any] = {}
        self.operations: dict[tuple[str, str], list[float]] = {}
        self.compiled, self.compile_s = 0, 0.0
        self.inside_call = False
        self.last: list[weakref.ref[Any]] = []
        self.loop: Loop | None = None
        self.failures: dict[str, str] = {}
        self._folder = folder
        self._process = os.getpid()
        self._writing = threading.Lock()

    def begin_loop(self, step: Any) -> None:
        """Observe a loop, of which the calls of `step` are the steps."""
        self.loop = Loop(step, self.guarded, self.write)

    @contextlib.contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """For the doctor's own work beside a call of the job: an exception in it is noted, and the job goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  reported as something that could not be checked
            self.failures[where] = f"{type(error).__name__}: {error}"

    def write(self) -> None:
        """Replace the file of this process. A process that was forked from this one writes nothing."""
        if os.getpid() != self._process:
            return
        partial = self._folder / f"{self._process}.partial"
        with self._writing, self.guarded("writing"), contextlib.suppress(OSError):  # the doctor has ended
            partial.write_text(json.dumps(self.as_object()))
            os.replace(partial, self._folder / f"{self._process}.json")

    def as_object(self) -> dict[str, Any]:
        """All that was observed, as JSON values."""
        return {
            "process": self._process,
            "failures": dict(self.failures),
            "functions": [function.as_object() for function in list(self.functions.values())],
            "operations": [
                {"line": line, "name": name, "count": count, "seconds": seconds}
                for (line, name), (count, seconds) in list(self.operations.items())
            ],
            **(self.loop.as_object() if self.loop else {"samples": None, "memory": None}),
        }
