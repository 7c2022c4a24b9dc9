"""Refuses launchers that number processes but do not tell them where to meet, since each would train alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from feedline._src.cluster.launchers.launcher import BY_HAND

DOCS = ""  # no line: the text below the table describes this error
_INDICES = {
    "PMIX_RANK": ("a PMIx launcher (prterun)", ""),
    "PMI_RANK": ("an MPI launcher (PMI)", "PMI_SIZE"),
    "MV2_COMM_WORLD_RANK": ("MVAPICH's mpirun_rsh", "MV2_COMM_WORLD_SIZE"),
    "JOB_COMPLETION_INDEX": ("a Kubernetes Indexed Job", ""),
}


def _found(environ: Mapping[str, str]) -> str | None:
    """The variable with the index. None under Slurm, where a batch script inherits variables of a task."""
    if environ.get("SLURM_JOB_ID"):
        return None
    indices = (index for index, (_, count) in _INDICES.items() if environ.get(index) and environ.get(count) != "1")
    return next(indices, None)


def started(environ: Mapping[str, str]) -> bool:
    return _found(environ) is not None


def find(environ: Mapping[str, str]) -> NoReturn:
    index = _found(environ) or ""
    raise ValueError(
        f"{_INDICES[index][0]} seems to have started this process ({index}={environ[index]}), but does not say "
        "where the processes meet; start them by srun, mpirun of Open MPI, mpiexec of MPICH, torchrun or "
        f"feedline launch, or set {BY_HAND} (in Kubernetes the manifest sets FEEDLINE_COORDINATOR and "
        "FEEDLINE_PROCESSES); if each process is to work alone, set FEEDLINE_PROCESSES to 1"
    )
