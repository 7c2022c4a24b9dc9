"""`feedline launch`: one command as several JAX processes on this machine."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start a command as several JAX processes on this machine.

    The command goes last, after --, and joins the processes by feedline.cluster.initialize():

        feedline launch --processes 4 --cpu -- python train.py --steps 100

    Each line of output comes after the index of its process. The first process that fails ends the
    others; the exit code is its own, 128 + s if signal s killed it. Ctrl-C and SIGTERM are passed on, the second
    one kills at once. No process outlives the launcher.
    """

    processes: int
    """How many."""
    cpu: bool = False
    """Run on the CPU."""
    devices_per_process: int | None = None
    """On the CPU, how many devices each is split into; else how many GPUs each gets, an equal share
    by default."""
    grace_s: float = 5.0
    """Seconds that the others get to end by themselves after the first failure."""
    stop_s: float = 60.0
    """Seconds that the processes get to save and end after Ctrl-C or SIGTERM, before they are killed."""
    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...")] = ()
    """The command, after --."""

    def run(self) -> int:
        """Returns the exit code. Raises `ValueError` where the options do not fit."""
        from feedline.cluster.launch import launch

        return launch(
            self.command,
            processes=self.processes,
            cpu=self.cpu,
            devices_per_process=self.devices_per_process,
            grace_s=self.grace_s,
            stop_s=self.stop_s,
        )
