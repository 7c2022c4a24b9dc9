"""Divides the cores of a host among the processes of a run on that host."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping

from feedline._src.cluster.cgroups import limits


def own_cores() -> int:
    """The cores that this process may use, divided by the processes of the run that share them; at least 1."""
    present = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quota = None
    with contextlib.suppress(OSError, ValueError):  # no cgroups, or in a form that is not known
        quota = limits().processors
    return share_of(os.environ, usable, present, quota)


def own_processes() -> int:
    """The processes of the run on this host; 1 if nothing tells."""
    return processes_on_host(os.environ)


def own_place(environ: Mapping[str, str]) -> tuple[int, int]:
    """The index of this process among those of the run on its host, and their number; (0, 1) if nothing tells.

    Example:
      >>> own_place({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
      (3, 8)
    """
    from feedline._src.cluster.launchers.process_info import is_number

    processes = processes_on_host(environ)
    name = next((index for index, count in _variables(environ) if environ.get(count)), "SLURM_LOCALID")
    index = environ.get(name, "")
    return (int(index), processes) if is_number(index) and int(index) < processes else (0, 1)


def share_of(environ: Mapping[str, str], usable: int, present: int, quota: float | None = None) -> int:
    """This process's share of the cores. Pure.

    A process that is bound to some of the host's cores (srun --cpus-per-task) does not share them.

    Args:
      usable: cores that this process may run on.
      present: cores that the host has.
      quota: cores that the cgroup grants to all processes of the run on this host; None: no limit.

    Example:
      >>> share_of({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, usable=128, present=128)
      16
      >>> share_of({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, usable=12, present=128)
      12
    """
    processes = processes_on_host(environ)
    share = usable if usable < present else usable // processes
    return max(1, share if quota is None else min(share, math.ceil(quota) // processes))


def processes_on_host(environ: Mapping[str, str]) -> int:
    """The number of processes of this run on this host, as the launcher reports it; 1 if it does not."""
    if not any("LOCAL" in name or name.startswith("SLURM_") for name in environ):
        return 1  # what each launcher says need not be imported
    from feedline._src.cluster.launchers.process_info import is_number
    from feedline._src.cluster.launchers.slurm import in_step, tasks_on

    for _, name in _variables(environ):
        if is_number(environ.get(name, "")):
            return max(1, int(environ[name]))
    if in_step(environ) and is_number(environ.get("SLURM_NODEID", "")):
        return tasks_on(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), int(environ["SLURM_NODEID"]))
    return 1


def _variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables of its index and the number of processes on the host, those of the inner launcher first."""
    from feedline._src.cluster.launchers import mpich, open_mpi, torchrun

    inner = [torchrun.LOCAL] if torchrun.under_torchrun(environ) else []
    return [("FEEDLINE_PROCESS", "FEEDLINE_LOCAL_PROCESSES"), *inner, open_mpi.LOCAL, mpich.LOCAL]
