"""Runs one command as several JAX processes on this machine, and ends with all of them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from feedline._src.cluster.detect import find
from feedline._src.options import checked_integer
from feedline._src.tools.launch.environments import process_environments
from feedline._src.tools.launch.lines import checked_label
from feedline._src.tools.launch.process_group import FORWARDED, ProcessGroup
from feedline._src.tools.launch.signals import signal_socket
from feedline._src.tools.launch.supervisor import Supervisor


def launch(
    command: Sequence[str],
    *,
    processes: int,
    cpu: bool = False,
    devices_per_process: int | None = None,
    grace_s: float = 5.0,
    stop_s: float = 60.0,
    timeout_s: float | None = None,
    label: str = "number",
) -> int:
    """Starts `command` once for each process, shows the output of all, and waits for all of them.

    The processes join by `feedline.cluster.initialize`. Their output is written in whole lines, to the stream it
    came from, each with the index of its process: `[2] step 7`. When a process fails, the others get SIGTERM, and
    SIGKILL after `grace_s`; then, after all other output, its last lines are shown again. SIGINT, SIGTERM and
    SIGHUP are forwarded. After SIGINT or SIGTERM the processes may save and end (see
    `feedline.cluster.should_stop`); `stop_s` later, or at the second signal, they are killed. When this returns,
    or the calling process ends in any way, no process is left (see `ProcessGroup`).

    While nobody reads the output, as in a pager, processes that write more wait, and signals and deadlines still
    count. When all processes have ended, the rest of the output is written for as long as it is read: half a
    minute after the last read, or at a further signal, this says that the rest is lost, and returns.

    After `jax.distributed.initialize`, jax catches SIGTERM and does nothing, so a program that does not call
    `should_stop` ends by SIGKILL.

    Call it from the main thread.

    Args:
      cpu: run on the CPU; see `process_environments` for this and `devices_per_process`.
      grace_s: seconds from the first failure to SIGKILL.
      stop_s: seconds from SIGINT or SIGTERM to SIGKILL.
      timeout_s: seconds after which the processes get SIGTERM, and SIGKILL `stop_s` later. None: no limit.
      label: what stands before each line: "number" (`[2] step 7`), "slurm" (`2: step 7`, as `srun --label`),
        "time" (`[2 14:03:59.125] step 7`) or "none".

    Returns:
      The exit code: 0 if all succeeded; else that of the first process that failed, or 128 + s if signal s killed
      it. 124 if `timeout_s` was over, even if the processes then ended with 0. As in a shell, 127 if there is no
      such command, 126 if it cannot be run.

    Raises:
      ValueError: an argument is invalid, or there are too few GPUs.

    Example:
      >>> launch(["true"], processes=2)
      0
    """
    if isinstance(command, str) or not command:
        raise ValueError(
            f"The command is a sequence of words, the program first, found {command!r}; for example "
            '["python", "train.py"]'
        )
    processes = checked_integer("processes", processes, at_least=1)
    if devices_per_process is not None:
        checked_integer("devices_per_process", devices_per_process, at_least=1)
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s is finite and above 0, found {timeout_s:g} s; leave it out for no limit")
    checked = checked_label(label)
    _warn_if_nested(os.environ)
    with _reserved_port() as port, signal_socket([signal.SIGCHLD, *FORWARDED]) as signals, ProcessGroup() as group:
        environments = process_environments(
            os.environ,
            processes=processes,
            coordinator=f"127.0.0.1:{port}",
            cpu=cpu,
            devices_per_process=devices_per_process,
            gpus=_visible_gpus(os.environ),
        )
        try:
            supervisor = Supervisor(
                group, signals, grace_s=grace_s, stop_s=stop_s, timeout_s=timeout_s, label=checked
            )
            return supervisor.run(command, environments)
        except BrokenPipeError:  # The reader of the output is gone. The exit code is that of SIGPIPE.
            return 128 + signal.SIGPIPE


def _warn_if_nested(environ: Mapping[str, str]) -> None:
    """Says so if this launcher is itself one of several processes, each of which then starts a run of its own."""
    with contextlib.suppress(ValueError):  # Its variables do not matter here.
        info = find(environ)
        if info is not None and info.process == 0:
            sys.stderr.write(
                f"feedline launch: each of {info.processes} processes, found {info.launcher} ({info.evidence}), "
                "starts a run of its own; for one run, let that launcher start the command itself (see --print)\n"
            )
            sys.stderr.flush()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port that the kernel gives to no other program while the block runs.

    The port is bound with SO_REUSEPORT, but not listened on. jax's coordinator, which uses gRPC, sets the same
    option and can therefore listen on it.
    """
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        yield port.getsockname()[1]


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES; if it is not set, a number for each GPU's device file."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    files = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    return [str(number) for number in range(len(files))]
