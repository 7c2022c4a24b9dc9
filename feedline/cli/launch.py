"""The `feedline launch` command: starts a command as several JAX processes on this machine."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start a command as several JAX processes on this machine.

    The command goes last, after --, and joins the processes by feedline.cluster.initialize():

        feedline launch --processes 4 --cpu -- python train.py --steps 100

    Each line of output begins with the index of its process. If a process fails, the others are ended, and the
    launcher exits with its code, or with 128 + s if signal s killed it. Ctrl-C and SIGTERM are forwarded; the
    second one kills at once. No process outlives the launcher.
    """

    processes: int
    """Number of processes."""
    cpu: bool = False
    """Run on the CPU."""
    devices_per_process: int | None = None
    """With --cpu: CPU devices of each process; by default as XLA_FLAGS says. Without: GPUs of each process; by
    default an equal share."""
    grace_s: float = 5.0
    """Seconds that the other processes may take to exit after the first failure, before they are killed."""
    stop_s: float = 60.0
    """Seconds that the processes may take to save and exit after Ctrl-C or SIGTERM, before they are killed."""
    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...")] = ()
    """The command, after --."""

    def run(self) -> int:
        """Returns the exit code. Raises `ValueError` if an option is wrong."""
        from feedline.cluster.launch import launch

        return launch(
            self.command,
            processes=self.processes,
            cpu=self.cpu,
            devices_per_process=self.devices_per_process,
            grace_s=self.grace_s,
            stop_s=self.stop_s,
        )
