"""Launchers that number their processes, but do not tell enough to join them."""

from __future__ import annotations

from collections.abc import Mapping

_INDICES = {
    "PMIX_RANK": ("a PMIx launcher (prterun)", None),
    "PMI_RANK": ("an MPI launcher (PMI)", "PMI_SIZE"),
    "MV2_COMM_WORLD_RANK": ("MVAPICH's mpirun_rsh", "MV2_COMM_WORLD_SIZE"),
}


def refuse_unknown(environ: Mapping[str, str]) -> None:
    """`ValueError` if a launcher that is not supported started several processes.

    Without this, each of them would train alone.
    """
    for index, (launcher, count) in _INDICES.items():
        if environ.get(index) and environ.get(count or "") != "1":
            raise ValueError(
                f"{launcher} seems to have started this process ({index}={environ[index]}), and does not say "
                "where the processes meet; start them by srun, mpirun of Open MPI, mpiexec of MPICH, torchrun or "
                "feedline launch, or set FEEDLINE_COORDINATOR, FEEDLINE_PROCESSES and FEEDLINE_PROCESS; where "
                "each process works on its own, set FEEDLINE_PROCESSES to 1"
            )
