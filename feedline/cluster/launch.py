"""Runs one command as several JAX processes on this machine, and ends with all of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence

from feedline.cluster.group import PASSED_ON, Group
from feedline.cluster.run import Run
from feedline.cluster.signals import caught
from feedline.cluster.spread import spread
from feedline.options import checked_integer


def launch(
    command: Sequence[str],
    *,
    processes: int,
    cpu: bool = False,
    devices_per_process: int | None = None,
    grace_s: float = 5.0,
    stop_s: float = 60.0,
) -> int:
    """Starts `command` once for each process, shows their output, and waits for all of them.

    Each process finds the others by `feedline.cluster.initialize`. Each line of output is written
    whole, to the stream it came from, after its process: `[2] step 7`. The first process that fails
    ends the others: they get SIGTERM, and SIGKILL after `grace_s`; its last lines are shown again.
    SIGINT, SIGTERM and SIGHUP are passed on. After SIGINT or SIGTERM the processes may save and end
    (see `feedline.cluster.should_stop`); `stop_s` later, or with the second signal, they are killed.
    When this returns, or the calling process ends in any way, no process is left (see `Group`).

    After `jax.distributed.initialize` jax notes SIGTERM and lets the program run on, so a program that
    does not ask `should_stop` ends by SIGKILL.

    Call it from the main thread.

    Args:
      cpu: run on the CPU; see `spread` for this and `devices_per_process`.
      grace_s: seconds from the first failure to SIGKILL.
      stop_s: seconds from SIGINT or SIGTERM to SIGKILL.

    Returns:
      The exit code: 0 if all succeeded; else of the first that failed, 128 + s if signal s killed it;
      as in a shell 127 if there is no such command, 126 if it cannot be run.

    Raises:
      ValueError: an argument does not fit, or there are too few GPUs.

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
    with _reserved_port() as port, caught([signal.SIGCHLD, *PASSED_ON]) as signals, Group() as group:
        environments = spread(
            os.environ,
            processes=processes,
            coordinator=f"127.0.0.1:{port}",
            cpu=cpu,
            devices_per_process=devices_per_process,
            gpus=_visible_gpus(os.environ),
        )
        try:
            return Run(group, signals, grace_s, stop_s).run(command, environments)
        except BrokenPipeError:  # Nobody reads what we write; SIGPIPE, were it not ignored.
            return 128 + signal.SIGPIPE


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port that nobody else is given while the block runs.

    It is bound but never listens. gRPC, on which jax's coordinator listens, shares a port with those
    who agreed to share it (SO_REUSEPORT), and the kernel hands it to no other program.
    """
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        yield port.getsockname()[1]


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; without it, numbered as many as have a device file."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    files = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    return [str(number) for number in range(len(files))]
