"""How many cores are this process's own, where several processes of a run share a host."""

from __future__ import annotations

import os
from collections.abc import Mapping

from feedline.cluster.found import is_number
from feedline.cluster.slurm import in_step, tasks_on


def own_cores() -> int:
    """Cores that this process may use, divided by the processes of its run that share them; at least 1."""
    present = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    return share_of(os.environ, usable, present)


def share_of(environ: Mapping[str, str], usable: int, present: int) -> int:
    """This process's share of the cores. Pure.

    One that a launcher has bound to some of the host's cores (srun --cpus-per-task) has those to itself.

    Args:
      usable: cores that this process may run on.
      present: cores that the host has.

    Example:
      >>> share_of({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, usable=128, present=128)
      16
      >>> share_of({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, usable=12, present=128)
      12
    """
    if usable < present:
        return usable
    return max(1, usable // processes_here(environ))


def processes_here(environ: Mapping[str, str]) -> int:
    """Processes of this run on this host, as their launcher counts them; 1 where none does."""
    for name in ("FEEDLINE_LOCAL_PROCESSES", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if is_number(environ.get(name, "")):
            return max(1, int(environ[name]))
    if in_step(environ) and is_number(environ.get("SLURM_NODEID", "")):
        return tasks_on(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), int(environ["SLURM_NODEID"]))
    return 1
