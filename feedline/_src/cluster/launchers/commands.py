"""Prints the command that starts the same processes on several hosts by srun or mpirun. Pure."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

from feedline._src.options import checked_integer

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
CPU_DEVICES = "--xla_force_host_platform_device_count"
"""The flag in XLA_FLAGS for the number of CPU devices."""
_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes of a run on several hosts.

    Attributes:
      command: what each process runs.
      hosts: how many.
      names: their names; empty if the launcher chooses them.
      processes: on each host.
      gpus: of each process; 0: it runs on the CPU.
      variables: environment variables that the launcher must set.
    """

    command: Sequence[str]
    hosts: int
    names: Sequence[str]
    processes: int
    gpus: int
    variables: Mapping[str, str]


def job_of(
    command: Sequence[str], *, hosts: str, processes: int, cpu: bool, devices_per_process: int | None
) -> Job:
    """The job that the options of `feedline launch` describe. `ValueError` if one is wrong."""
    if not command:
        raise ValueError("There is no command; write it after --, as in `-- python train.py`")
    count, names = checked_hosts(hosts)
    checked_integer("processes", processes, at_least=1)
    if devices_per_process is not None:
        checked_integer("devices_per_process", devices_per_process, at_least=1)
    # Otherwise Python buffers what it writes, and the last output of a killed process is lost.
    variables = {"PYTHONUNBUFFERED": "1"}
    if cpu:
        variables["JAX_PLATFORMS"] = "cpu"
        if devices_per_process:
            variables["XLA_FLAGS"] = f"{CPU_DEVICES}={devices_per_process}"
    return Job(command, count, names, processes, 0 if cpu else devices_per_process or 1, variables)


def checked_hosts(hosts: str) -> tuple[int, tuple[str, ...]]:
    """The number of hosts, and their names if it is not only a number.

    Example:
      >>> checked_hosts("4"), checked_hosts("dgx1,dgx2")
      ((4, ()), (2, ('dgx1', 'dgx2')))
    """
    if hosts.isascii() and hosts.isdecimal() and len(hosts) <= _DIGITS and int(hosts) > 0:
        return int(hosts), ()
    names = tuple(hosts.split(","))
    wrong = [name for name in names if not _HOST.fullmatch(name) or name.isdecimal()]
    if wrong or len(set(names)) < len(names):
        raise ValueError(
            f"The hosts are a number, or different names, found {hosts!r}; for example --hosts 4, or "
            "--hosts dgx1,dgx2"
        )
    return len(names), names


def srun_command(job: Job) -> str:
    """The srun command, for a shell on the login node.

    Example:
      >>> srun_command(Job(["python", "train.py"], 2, (), 8, 1, {})).partition(" --exclusive ")[0]
      'srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8'
    """
    options = [f"--nodes={job.hosts}", f"--ntasks-per-node={job.processes}"]
    if job.names:
        options.append(f"--nodelist={','.join(job.names)}")
    if job.gpus:
        options.append(f"--gpus-per-node={job.processes * job.gpus}")
    # Slurm's own binding may choose cores far from the GPU; without it, initialize binds the process.
    options += ["--exclusive", "--cpu-bind=none", "--kill-on-bad-exit=1", "--label"]
    settings = [f"{name}={value}" for name, value in job.variables.items()]  # srun passes its own variables on.
    return _joined([*(["env", *settings] if settings else []), "srun", *options], job.command)


def mpirun_command(job: Job) -> str:
    """The mpirun command of Open MPI 4 or 5, to be run on the first host or within a job of Slurm.

    Example:
      >>> mpirun_command(Job(["python", "train.py"], 2, ("dgx1", "dgx2"), 8, 1, {})).partition(" --tag-output ")[0]
      'mpirun -n 16 --host dgx1:8,dgx2:8 --map-by ppr:8:node --bind-to none'
    """
    options = ["-n", str(job.hosts * job.processes)]
    if job.names:
        options += ["--host", ",".join(f"{name}:{job.processes}" for name in job.names)]
    # By default mpirun binds each process to one core, and waits 1 s after SIGTERM, too short to save.
    options += ["--map-by", f"ppr:{job.processes}:node", "--bind-to", "none", "--tag-output"]
    options += ["--mca", "odls_base_sigkill_timeout", "15"]
    for name, value in job.variables.items():
        options += ["-x", f"{name}={value}"]
    return _joined(["mpirun", *options], job.command)


def _joined(launcher: Sequence[str], command: Sequence[str]) -> str:
    return f"{shlex.join(launcher)} {shlex.join(command)}"
