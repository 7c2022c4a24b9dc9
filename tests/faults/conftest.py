"""A fixture of the tests of faults: run a program that meets a fault, and see what it leaves."""

import contextlib
import functools
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import programs
import pytest

PATIENCE_S = 300
"""How long a program may take to end by itself."""
LEAVES_S = 30
"""How long the processes that a program started may outlive it."""


class Ended(NamedTuple):
    """How a program ended.

    Attributes:
      seconds: from its start to its end.
      left: the ids of its processes that still ran LEAVES_S later.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    left: list[int]


class Program:
    """A Python program in a process of its own, started at once.

    Args:
      stack: an `ExitStack`; its end kills the program.
      script: its text, which is written to `folder`.
      folder: where it runs.
      variables: what is added to its environment.
    """

    def __init__(self, stack, folder, script, *arguments, **variables):
        self._mark = f"{uuid.uuid4()}"
        self._began = time.monotonic()
        (folder / "script.py").write_text(script)
        started = programs.started(
            [sys.executable, "script.py", *arguments], cwd=folder, text=True, limit_s=10 * PATIENCE_S,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | variables | {"FEEDLINE_FAULT": self._mark},
        )  # fmt: skip
        self.process = stack.enter_context(started)
        stack.callback(self.kill)

    def end(self, patience_s=PATIENCE_S):
        """Wait for its end."""
        try:
            stdout, stderr = self.process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        seconds = time.monotonic() - self._began
        deadline = time.monotonic() + LEAVES_S
        while (left := [*self.processes()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return Ended(self.process.returncode, stdout, stderr, seconds, left)

    def kill(self):
        """Kill those of its processes that are left. Idempotent."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.communicate()

    def processes(self):
        """The process ids of the program and all that it started."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes()
                dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if f"FEEDLINE_FAULT={self._mark}".encode() in variables.split(b"\0") and not dead:
                found.append(int(folder.name))
        return found


@pytest.fixture
def start(tmp_path):
    """Starts a script as a `Program` in the test's folder."""
    with contextlib.ExitStack() as stack:
        yield functools.partial(Program, stack, tmp_path)
