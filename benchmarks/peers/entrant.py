"""An entrant of the benchmarks of peers: a folder of readers/, run in a process and an environment of its own."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

READERS = Path(__file__).with_name("readers")
_CONSUMER = Path(__file__).with_name("consume.py")
_INSTALL_LIMIT_S, _LEAVING_S, _ERROR_LINES = 1800.0, 5.0, 4


class CannotRun(RuntimeError):
    """An entrant cannot be measured: it cannot be installed, failed, or did not answer."""


def interpreter_for(requirements: Path, folder: Path | None) -> Path:
    """The Python of an entrant's environment in `folder`; without a folder or requirements, this Python.

    Entrants with equal requirements share an environment. All environments get this interpreter's version of jax.
    """
    if folder is None or not requirements.exists():
        return Path(sys.executable)
    lines = [line.strip() for line in requirements.read_text().splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    return _made([*wanted, f"jax=={importlib.metadata.version('jax')}"], folder)


def _made(wanted: list[str], folder: Path) -> Path:
    """Create the environment, unless an earlier run completed it."""
    digest = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    home = folder.absolute() / f"{wanted[0].partition('==')[0]}-{digest}"
    python, complete = home / "bin" / "python", home / "complete"
    if complete.exists():
        return python
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [str(python), "-m", "pip", "install", "--quiet", *wanted],
    ):
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_INSTALL_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise CannotRun(f"{' '.join(wanted)}: not installed after {error.timeout:.0f} s") from error
        if ended.returncode:
            raise CannotRun(f"{' '.join(wanted)} could not be installed: {_last_lines(ended.stderr)}")
    complete.touch()
    return python


def _last_lines(text: str) -> str:
    """The last lines of a program's output, which contain its error, joined to one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-_ERROR_LINES:])


class Entrant:
    """A process that runs benchmarks/peers/consume.py with the reader of one entrant.

    For use by one thread, which must call `close`. Between two requests SIGSTOP stops the whole process group,
    so that no thread or worker of an idle entrant takes time from the one that is measured. The group is in the
    session of this process: if this process is killed, the kernel sends SIGCONT and SIGHUP to the group.
    """

    def __init__(self, name: str, interpreter: Path, work: Path, consumer: Path = _CONSUMER) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._work = work
        self._log = work / f"{name}.log"
        with self._log.open("w") as printed:
            self._process = subprocess.Popen(
                # -P, because the readers' folders have the names of libraries
                [interpreter, "-P", consumer, READERS / name / "reader.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                process_group=0,
            )

    def ask(
        self, do: str, task: dict[str, Any] | None = None, limit_s: float = 300.0, **request: Any
    ) -> dict[str, Any]:
        """Send a request to consume.py, and return the answer. The task gets a folder of this entrant's own.

        Raises:
          CannotRun: the process ended, or did not answer. The entrant is then closed.
        """
        if task is not None:
            request["task"] = {**task, "folder": str(self._work / f"{self.name}-{task['folder']}")}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
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
            raise CannotRun(f"{do}: it {ended}: {_last_lines(self._log.read_text(errors='replace'))}")
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

    def check(self, task: dict[str, Any], limit: int | None) -> dict[str, Any]:
        """Convert the data to the entrant's format if needed, and compare `limit` batches; None: an epoch."""
        prepared = self.ask("prepare", task, limit_s=1800)
        found = self.ask("check", task, limit=limit)
        right = not (found["wrong"] or found["repeated"] or found["missing"])
        return {"prepare_s": prepared["seconds"], **found, "right": right}

    def measure(self, task: dict[str, Any], warm_up_s: float, seconds: float) -> dict[str, Any]:
        """Measure one round: rows and seconds."""
        found = self.ask("measure", task, warm_up_s=warm_up_s, seconds=seconds)
        return {**found, "rows_per_s": found["rows"] / found["seconds"]}
