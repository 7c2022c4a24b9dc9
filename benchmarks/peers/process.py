"""The process of one entrant: it takes one request at a time, and is stopped between requests."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

from peers.environments import CannotRun, last_lines

_LEAVING_S = 5.0


class Peer:
    """A process that runs benchmarks/peers/consume.py with one reader.

    One thread uses it; its creator closes it. Between two requests SIGSTOP stops the whole process group,
    so that no thread or worker of an idle peer takes time from the one that is measured. The group is in the
    session of this process: if this process is killed, the kernel sends SIGCONT and SIGHUP to it.

    Args:
      interpreter: the Python of its environment.
      consumer: consume.py.
      reader: the entrant's reader.py.
      log: file for its output.
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
        """Its answer to a request; consume.py documents both.

        Raises:
          CannotRun: the process ended, or did not answer within `limit_s` seconds. The peer is closed then.
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
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # it does not stop at once
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process and its children. Idempotent."""
        if self._process.returncode is not None:
            return
        os.killpg(self._process.pid, signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # the process did not read the last request
                    pipe.close()
        try:
            self._process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # usually no worker is left
            os.killpg(self._process.pid, signal.SIGKILL)
