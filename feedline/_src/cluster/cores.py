"""Divides the cores of a host among the processes of a run on that host."""

from __future__ import annotations

import contextlib
import math
import os

from feedline._src.machine import quota


def own_cores() -> int:
    """This process's equal share of the host's cores, at most as many as it may use, and at least 1."""
    present = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    granted = None
    with contextlib.suppress(OSError, ValueError):  # no cgroups, or in an unknown form
        granted = quota()
    return share_of(own_processes(), usable, present, granted)


def own_processes() -> int:
    """The number of processes of the run on this host; 1 if no launcher is detected."""
    from feedline._src.cluster.detect import find

    with contextlib.suppress(ValueError):  # `initialize` reports this error
        if (info := find(os.environ)) is not None:
            return info.local_processes
    return 1


def share_of(processes: int, usable: int, present: int, quota: float | None = None) -> int:
    """One process's equal share of the host's cores, at most as many as it may use (srun --cpus-per-task)."""
    share = min(usable, present // processes)
    return max(1, share if quota is None else min(share, math.ceil(quota) // processes))
