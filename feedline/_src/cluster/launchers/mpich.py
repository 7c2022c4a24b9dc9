"""mpiexec of MPICH (Hydra)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from feedline._src.cluster.launchers.launcher import ProcessInfo, agreed_port, ranked

DOCS = """\
| MPICH | MPI_LOCALRANKID or MPI_LOCALNRANKS | PMI_RANK, PMI_SIZE | the host of mpiexec, from the command line of \
hydra_pmi_proxy, a port from a hash |"""
_NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# "hydra_pmi_proxy --control-port node1:41219 …": where mpiexec listens.
_CONTROL = re.compile(r"\S*hydra_pmi_proxy\0(?:.*\0)?--control-port\0([^\0]+):(\d+)\0")


def started(environ: Mapping[str, str]) -> bool:
    """Decides by the MPI_LOCAL variables, since `srun --mpi=pmi2` sets the PMI_ variables, too."""
    return any(environ.get(name) for name in _NAMES[2:])


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    """If process 0 is not on the host of mpiexec, FEEDLINE_COORDINATOR must name the host of process 0."""
    return ranked(environ, "MPICH", _NAMES, lambda one_host: _coordinator(environ, one_host))


def _coordinator(environ: Mapping[str, str], one_host: bool) -> str:
    control = control_address()
    if control is None:
        raise ValueError(
            "MPICH does not tell its processes where they meet (feedline found no hydra_pmi_proxy among the "
            "ancestors of this process, as in a container); name the host of process 0 and a free port there: "
            "mpiexec -genv FEEDLINE_COORDINATOR node1:61500 …"
        )
    host, port = control
    return f"{'127.0.0.1' if one_host else host}:{agreed_port(environ, f'{host}:{port}')}"


def control_address() -> tuple[str, str] | None:
    """Host and port on which mpiexec listens, from the command line of its proxy, an ancestor of this process."""
    pid = os.getppid()
    while pid > 1:
        try:
            if found := _CONTROL.match(Path(f"/proc/{pid}/cmdline").read_text(errors="replace")):
                return found[1], found[2]
            # The name of the program, in parentheses, may hold spaces and parentheses.
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return None
