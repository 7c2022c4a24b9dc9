"""A group of processes that is killed when the process that made it ends, in whatever way."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that ask a process to end. The guard ignores them, because it must outlive the group."""
_GUARD = "trap '' HUP INT TERM; echo ready; read -r _; kill -s KILL 0"


class ProcessGroup:
    """Starts processes and signals them; none of them outlives the process that owns the group.

    The first process of the group is its guard: a shell that reads from a pipe. Only the owner has the writing
    end, and never writes. When the owner ends, even by SIGKILL, the kernel closes that end, and the guard kills
    the whole group and itself. So:

    1. No process outlives the owner. A process that is being started has the writing end too, and joins the
       group before it executes its program, which closes that end. The guard wakes when the last copy is closed;
       then every process is in the group, and so are its children; not a program that leaves it (`setsid`).
    2. No signal reaches another program. The group's number, `pid`, is the guard's, which the kernel does not use
       again before the owner has reaped the guard; that happens last.

    Example:
      >>> with ProcessGroup() as group:
      ...     child = group.start(["sleep", "1000"], {}, stdout=subprocess.DEVNULL)
      >>> child.returncode
      -9
    """

    def __enter__(self) -> Self:
        self._started: list[subprocess.Popen[bytes]] = []
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        self.pid = self._guard.pid
        with self._guard.stdout as ready:  # type: ignore[union-attr]
            ready.readline()  # now it ignores the signals that are sent to the group
        return self

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        """Starts a program in the group. A stream that is None is inherited. `OSError` if it cannot be run."""
        child = subprocess.Popen(
            command, env=environ, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, process_group=self.pid
        )
        self._started.append(child)
        return child

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the group, including children of the programs."""
        os.killpg(self.pid, number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signal(signal.SIGKILL)
        for child in self._started:
            with child:  # closes its pipes and reaps it
                pass
        with self._guard:
            pass
