"""Detects what started this process, from the environment variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from feedline._src.cluster.launchers import (
    by_hand,
    kubernetes,
    mpich,
    open_mpi,
    pbs,
    slurm,
    torch_variables,
    torchrun,
    unknown,
)
from feedline._src.cluster.launchers.launcher import Job, Launcher, ProcessInfo, explicit_coordinator

LAUNCHERS: tuple[Launcher, ...] = (
    kubernetes,
    pbs,
    by_hand,
    torchrun,  # srun torchrun starts one torchrun on each host
    open_mpi,  # under Slurm, mpirun and mpiexec start their own processes by srun
    mpich,
    slurm,
    torch_variables,
    unknown,
)
"""The first launcher whose `started` returns True started this process. Inner launchers come before outer ones."""
PRINTERS: dict[str, Callable[[Job], str]] = {
    "slurm": slurm.printed,
    "mpirun": open_mpi.printed,
    "jobset": kubernetes.printed,
    "pbs": pbs.printed,
}
"""The functions that return what `feedline launch --print` prints."""


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    """The index of this process, the number of processes, and the coordinator; None if it is the only process.

    An empty variable counts as not set. If variables are missing or contradict each other, a `ValueError` names
    the variables to set.
    """
    launcher = next((each for each in LAUNCHERS if each.started(environ)), None)
    if launcher is None and explicit_coordinator(environ):
        launcher = by_hand  # its `find` raises, because a coordinator alone starts nothing
    return None if launcher is None else launcher.find(environ)


def describe_single_process(environ: Mapping[str, str]) -> str:
    """The line that `initialize` prints if `find` returns None."""
    return f"process 0 of 1, {slurm.hint(environ) or 'because no launcher started other processes'}"
