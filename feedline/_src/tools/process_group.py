"""A process group that is killed when its context, or the process that made it, ends in any way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that ask a process to end. The guard ignores them."""
_GUARD = "trap '' HUP INT TERM; echo ready; read -r _; kill -s KILL 0"


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """Yields the number of a process group, for `Popen(process_group=...)`, and kills the group at the end.

    The group's first process is its guard, a shell. The guard's pid is the group's number, and is not reused
    before the group is killed, so no signal reaches another program. The guard reads from a pipe; only this
    process has its writing end. When this process ends, even by SIGKILL, the kernel closes that end, and the guard
    kills the group. So no process in it outlives this one, except a program that leaves it (`setsid`).

    Example:
      >>> with process_group() as group:
      ...     child = subprocess.Popen(["sleep", "1000"], process_group=group)
      >>> child.wait()
      -9
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(["/bin/sh", "-c", _GUARD], stdin=pipe, stdout=pipe, process_group=0) as guard:
        try:
            assert guard.stdout is not None, "it is a pipe"
            guard.stdout.readline()  # from now on the guard ignores signals to the group
            yield guard.pid
        finally:
            os.killpg(guard.pid, signal.SIGKILL)
