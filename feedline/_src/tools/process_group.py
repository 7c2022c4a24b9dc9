"""A process group that is killed when its `with` block or the process that created it ends, in any way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that ask a process to end: `feedline launch` forwards them, and the guard ignores them."""
_GUARD = "trap '' HUP INT TERM; echo ready; read -r _; kill -s KILL 0"


@contextlib.contextmanager
def process_group() -> Iterator[int]:
    """Create a process group, yield its number for `Popen(process_group=...)`, and kill the group at the end.

    The group's first process is its guard, a shell. The guard's pid is the group's number, and is not reused
    before the group is killed, so no signal reaches another program. The guard reads from a pipe; only this
    process has the writing end. When this process ends, even by SIGKILL, the kernel closes that end, and the guard
    kills the group. So no process of the group outlives this one, unless it has left the group (`setsid`).

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
            guard.stdout.readline()  # waits until the guard ignores signals to the group
            yield guard.pid
        finally:
            os.killpg(guard.pid, signal.SIGKILL)
