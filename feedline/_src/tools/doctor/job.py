"""Runs a command while it is observed, and collects what was observed in its processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_OBSERVE = "feedline._src.tools.doctor.inside.start"
_GRACE_S = 15.0
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
      limit_s: after so many seconds the command gets SIGINT, as by Ctrl-C; after 15 more it is killed.

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
        with subprocess.Popen(command, env={**environ, "PYTHONPATH": path}) as process:
            stopped = _wait(process, limit_s)
        found = []
        for file in sorted(Path(folder).glob("*.json")):
            with contextlib.suppress(ValueError):  # another program's: the hooks replace whole files
                found.append(json.loads(file.read_text()))
        failed = Path(folder, "not_observed.txt")
        reason = failed.read_text() if failed.exists() else "no process of the command imported jax in Python"
    code = process.returncode
    return Ran(128 - code if code < 0 else code, stopped, found, "" if found else reason)


def _wait(process: subprocess.Popen[bytes], limit_s: float | None) -> bool:
    """Wait for the end. Returns whether the process was stopped before it."""
    try:
        process.wait(limit_s)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    except KeyboardInterrupt:  # the terminal has sent it to the command, too
        pass
    except SystemExit:  # by a signal to this process
        process.terminate()
        _await_end(process)
        raise
    _await_end(process)
    return True


def _await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process that was told to end; after a while, or at Ctrl-C, it is killed."""
    began = time.monotonic()
    while process.poll() is None:
        try:
            process.wait(max(0.0, began + _GRACE_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except KeyboardInterrupt:  # once more
            process.kill()


def _calls(process: Mapping[str, Any]) -> int:
    return sum(function["calls"] for function in process["functions"])
