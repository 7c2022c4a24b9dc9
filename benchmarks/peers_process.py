"""One entrant's process: asked for one thing at a time, and stopped in between."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

from peers_environments import CannotRun, last_lines

_LEAVING_S = 5.0


class Peer:
    """A process that runs benchmarks/peers/consume.py with one reader.

    Called by one thread; who made it closes it. Between two requests the whole process group is
    stopped by SIGSTOP, so that no thread or worker of an idle peer takes time from the one that is
    measured. It shares the session of this process: if this one is killed, the kernel wakes the
    stopped group and hangs it up.

    Args:
      interpreter: the Python of its environment.
      consumer: consume.py.
      reader: the entrant's reader.py.
      log: file that takes what it prints.
    """

    def __init__(self, interpreter: Path, consumer: Path, reader: Path, log: Path) -> None:
        self._log = log
        with log.open("w") as printed:
            self._process = subprocess.Popen(
                [interpreter, "-P", consumer, reader],  # -P: the readers' folders are named like the libraries
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                process_group=0,
            )

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Its answer to a request, as consume.py documents them.

        Raises:
          CannotRun: it ended, or did not answer in `limit_s` seconds. It is closed then.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
            if not ready:
                os.killpg(self._process.pid, signal.SIGKILL)
            line = self._process.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, line = [self._process.stdout], b""
        if not line:
            self.close()
            ended = f"ended with code {self._process.returncode}" if ready else f"gave no answer in {limit_s:g} s"
            raise CannotRun(f"{request['do']}: it {ended}: {last_lines(self._log.read_text(errors='replace'))}")
        os.killpg(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # it stops a little later
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it and what it started. Idempotent."""
        if self._process.returncode is not None:
            return
        os.killpg(self._process.pid, signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that it did not read
                    pipe.close()
        try:
            self._process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # as a rule it left no worker
            os.killpg(self._process.pid, signal.SIGKILL)
