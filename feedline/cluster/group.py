"""A group of processes that ends with the process that made it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

# What asks a process to end; the guard must outlive it.
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

_GUARD = "trap '' HUP INT TERM; echo ready; read -r _; kill -s KILL 0"


class Group:
    """Starts processes, signals them, and leaves none behind.

    The first process of the group is its guard: a shell that waits for the end of a pipe into which
    nobody writes, and whose other end only we hold. When we end, even by SIGKILL, the kernel closes
    that end, and the guard kills its whole group, itself included. So:

    1. No process outlives us. One that is being started has our end of the pipe too, and joins the
       group before it becomes its program and so lets go of that end. The guard wakes when the last
       end is closed: by then every process is in the group, and its own children are born into it.
    2. No signal reaches a stranger. The group's number is the guard's pid, which the kernel gives to
       nobody else while we have not reaped the guard; we do that last.

    A program that leaves the group (`setsid`, a daemon) leaves our reach; we still signal one that
    we started ourselves.

    Called, owned and closed by one thread.

    Example:
      >>> with Group() as group:
      ...     child = group.start(["sleep", "1000"], {}, stdout=subprocess.DEVNULL)
      >>> child.returncode
      -9
    """

    def __enter__(self) -> Self:
        self._started: list[subprocess.Popen[bytes]] = []
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        # From here on it ignores what is sent to the group.
        with self._guard.stdout as ready:  # type: ignore[union-attr]
            ready.readline()
        return self

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        """Starts a program in the group, without input. Raises `OSError` if it cannot be run."""
        child = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            process_group=self._guard.pid,
        )
        self._started.append(child)
        return child

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the group, grandchildren included."""
        os.killpg(self._guard.pid, number)
        for child in self._started:
            if child.poll() is None and os.getpgid(child.pid) != self._guard.pid:
                child.send_signal(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signal(signal.SIGKILL)
        for child in self._started:
            child.wait()
            for stream in (child.stdout, child.stderr):
                if stream is not None:
                    stream.close()
        with self._guard:  # Closes the pipe and reaps.
            pass
