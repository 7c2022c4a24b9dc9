"""The `feedline launch` command: starts a command as several JAX processes on this machine."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Annotated, Literal

import tyro

from feedline._src.cluster.detect import PRINTERS
from feedline._src.cluster.launchers.launcher import Job
from feedline._src.options import checked_integer
from feedline._src.tools.cli.options import flags_for_cpu_devices

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start a command as several JAX processes on this machine.

    The command goes last, after --, and joins the processes by feedline.cluster.initialize():

        feedline launch --processes 4 --cpu -- python train.py --steps 100

    Each line of output begins with the index of its process. If a process fails, the others are ended, its last
    lines are shown again, and the launcher exits with its code, or with 128 + s if signal s killed it. Ctrl-C and
    SIGTERM are forwarded; the second one kills at once. No process outlives the launcher.

    On several hosts, srun, mpirun, Kubernetes or PBS starts the processes. This prints what it reads:

        feedline launch --processes 8 --hosts 4 --print slurm -- python train.py
    """

    processes: int
    """Number of processes; with --hosts on each host."""
    cpu: bool = False
    """Run on the CPU."""
    devices_per_process: int | None = None
    """With --cpu: CPU devices of each process; by default as XLA_FLAGS says. Without: GPUs of each process; by
    default an equal share, with --print one."""
    grace_s: float = 5.0
    """Seconds that the other processes may take to exit after the first failure, before they are killed."""
    stop_s: float = 60.0
    """Seconds that the processes may take to save and exit after Ctrl-C or SIGTERM, before they are killed."""
    label: Literal["number", "slurm", "time", "none"] = "number"
    """What stands before each line: `[2] line`, `2: line` as srun --label, `[2 14:03:59.125] line`, or nothing."""
    print_for: Annotated[Literal["slurm", "mpirun", "jobset", "pbs"] | None, tyro.conf.arg(name="print")] = None
    """Start nothing: print the srun command, the mpirun command (Open MPI), the manifest of a JobSet, or a script
    for qsub."""
    hosts: str | None = None
    """With --print: the number of hosts, or their names, as in dgx1,dgx2; by default 1."""
    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...")] = ()
    """The command, after --."""

    def run(self) -> int:
        """Returns the exit code (see `Supervisor.run`). Raises `ValueError` if an option is wrong."""
        if not self.command:
            raise ValueError("launch needs a command after --, found none; for example -- python train.py")
        checked_integer("--processes", self.processes, at_least=1)
        if self.devices_per_process is not None:
            checked_integer("--devices-per-process", self.devices_per_process, at_least=1)
        if self.print_for:
            print(PRINTERS[self.print_for](self._job()).rstrip("\n"))
            return 0
        if self.hosts:
            raise ValueError(
                f"feedline launch starts processes on this machine only, found --hosts {self.hosts}; --print "
                "slurm, mpirun, jobset or pbs prints what starts them on several"
            )
        from feedline._src.tools.launch.environments import process_environments, reserved_port
        from feedline._src.tools.launch.supervisor import Supervisor

        with reserved_port() as port:
            environments = process_environments(
                os.environ,
                processes=self.processes,
                coordinator=f"127.0.0.1:{port}",
                cpu=self.cpu,
                devices_per_process=self.devices_per_process,
            )
            return Supervisor(self.command, environments, self.grace_s, self.stop_s, self.label).run()

    def _job(self) -> Job:
        hosts = self.hosts or "1"
        names = () if re.fullmatch("[0-9]{1,6}", hosts) else tuple(hosts.split(","))
        count = len(names) or int(hosts)
        wrong = [name for name in names if not _HOST.fullmatch(name) or name.isdecimal()]
        if wrong or len(set(names)) < len(names) or not count:
            raise ValueError(
                f"The hosts are a number, or different names, found {hosts!r}; for example --hosts 4, or "
                "--hosts dgx1,dgx2"
            )
        # Otherwise Python buffers what it writes, and the last output of a killed process is lost.
        variables = {"PYTHONUNBUFFERED": "1"}
        if self.cpu:
            variables["JAX_PLATFORMS"] = "cpu"
            if self.devices_per_process:
                variables["XLA_FLAGS"] = flags_for_cpu_devices("", self.devices_per_process)
        gpus = 0 if self.cpu else self.devices_per_process or 1
        return Job(self.command, count, names, self.processes, gpus, variables)
