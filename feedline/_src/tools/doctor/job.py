"""Runs a command while it is observed, and collects what was observed in its processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_OBSERVE = "feedline._src.tools.doctor.inside.start"
_GRACE_S = 15.0
_KILLED_S = 5.0  # how long a killed process may take to end
_MARK = "FEEDLINE_DOCTOR"  # the variable by which the job's processes are found
_CUSTOMIZE = '''"""Written by feedline, for the processes of one command."""
import sys

folder = {folder!r}
sys.path[:] = [path for path in sys.path if path != folder]
this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # this Python's own
except ImportError:
    pass
sys.modules.setdefault("sitecustomize", this)
try:
    from {module} import start
except ImportError as error:
    with open(folder + "/not_observed.txt", "w") as file:
        file.write(f"{{sys.executable}} cannot import feedline: {{error}}")
else:
    start(folder)
'''


class Ran(NamedTuple):
    """A command that has ended.

    Attributes:
      code: its exit code; 128 + s if signal s ended it.
      stopped: whether it was ended by Ctrl-C, or after its time.
      processes: what each process wrote; of `run`: what `inside.record` observed in each that imported jax, most
        calls first.
      reason: why nothing was observed; empty if something was.
    """

    code: int
    stopped: bool
    processes: list[dict[str, Any]]
    reason: str


def run(command: Sequence[str], environ: Mapping[str, str], limit_s: float | None) -> Ran:
    """Run the command with this process's standard streams, and observe its processes.

    Args:
      environ: the environment of the command.
      limit_s: seconds after which the job gets SIGINT, as by Ctrl-C; 15 s later, what is left of it is killed.

    Raises:
      OSError: the command could not be started.
    """
    ran = run_with(_OBSERVE, command, environ, limit_s)
    return ran._replace(processes=sorted(ran.processes, key=_calls, reverse=True))


def run_with(
    module: str, command: Sequence[str], environ: Mapping[str, str], limit_s: float | None = None, given: str = ""
) -> Ran:
    """Run the command with this process's standard streams, and a function of ours in each of its processes.

    Python imports `sitecustomize` when it starts. PYTHONPATH leads it to one that installs the hooks. So the
    script is not changed, and processes that the command starts are observed, too.

    Args:
      module: its function `start` is called in each process, with a folder for a file of JSON.
      environ, limit_s: as for `run`.
      given: the text of a file "given.txt" in that folder.

    Raises:
      OSError: the command could not be started.
    """
    with tempfile.TemporaryDirectory(prefix="feedline-doctor-", ignore_cleanup_errors=True) as folder:
        Path(folder, "sitecustomize.py").write_text(_CUSTOMIZE.format(folder=folder, module=module))
        Path(folder, "given.txt").write_text(given)
        path = ":".join(filter(None, (folder, environ.get("PYTHONPATH", ""))))
        with subprocess.Popen(command, env={**environ, "PYTHONPATH": path, _MARK: folder}) as process:
            stopped = _wait(process, limit_s, folder)
        found = []
        for file in sorted(Path(folder).glob("*.json")):
            with contextlib.suppress(ValueError):  # another program's: the hooks replace whole files
                found.append(json.loads(file.read_text()))
        failed = Path(folder, "not_observed.txt")
        reason = failed.read_text() if failed.exists() else "no process of the command imported jax in Python"
    code = process.returncode
    return Ran(128 - code if code < 0 else code, stopped, found, "" if found else reason)


def _wait(process: subprocess.Popen[bytes], limit_s: float | None, folder: str) -> bool:
    """Wait for the end of the command. Returns whether the job was stopped before."""
    try:
        process.wait(limit_s)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        others = {pid: group for pid, group in _started(folder).items() if pid != process.pid}
        _signal([pid for pid, group in others.items() if group == os.getpgrp()], signal.SIGINT)  # as terminals do
    except KeyboardInterrupt:  # the terminal has sent it to the job, too
        pass
    except SystemExit:  # by a signal to this process
        process.terminate()
        _await_end(process, folder)
        raise
    _await_end(process, folder)
    return True


def _await_end(process: subprocess.Popen[bytes], folder: str) -> None:
    """Wait for the end of a job that was told to end; after a grace period, or at Ctrl-C, it is killed.

    What outlives the command, such as a child of a shell, gets SIGTERM.
    """
    deadline = time.monotonic() + _GRACE_S
    try:
        process.wait(_GRACE_S)
        _signal(_started(folder), signal.SIGTERM)
        _await_all(folder, deadline)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # Ctrl-C once more
        pass
    process.kill()
    _signal(_started(folder), signal.SIGKILL)
    process.wait()
    _await_all(folder, time.monotonic() + _KILLED_S)


def _started(folder: str) -> dict[int, int]:
    """The running processes of the job in this session, whoever their parents are now: pid → process group."""
    mark, found = f"{_MARK}={folder}".encode(), {}
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):  # ended; another user's
            pid = int(file.parent.name)
            if mark in file.read_bytes().split(b"\0") and os.getsid(pid) == os.getsid(0):
                found[pid] = os.getpgid(pid)
    return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)


def _await_all(folder: str, deadline: float) -> None:
    """Wait for the ends of the job's processes, which need not be children of this one."""
    while time.monotonic() < deadline and (pids := _started(folder)):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            descriptor = os.pidfd_open(next(iter(pids)))
            try:
                select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(descriptor)


def _calls(process: Mapping[str, Any]) -> int:
    return sum(function["calls"] for function in process["functions"])
