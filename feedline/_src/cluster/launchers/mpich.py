"""Finds this process among those that mpiexec of MPICH (Hydra) started."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from feedline._src.cluster.launchers.local import local_place
from feedline._src.cluster.launchers.process_info import ProcessInfo, agreed_port, integer, own_devices
from feedline._src.cluster.launchers.variables import explicit_coordinator

LOCAL = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# "hydra_pmi_proxy --control-port node1:41219 …": where mpiexec listens.
_CONTROL = re.compile(r"\S*hydra_pmi_proxy\0(?:.*\0)?--control-port\0([^\0]+):(\d+)\0")


def under_hydra(environ: Mapping[str, str]) -> bool:
    """Whether Hydra started this process. `srun --mpi=pmi2` sets the PMI_ variables too, but not these."""
    return any(environ.get(name) for name in LOCAL)


def control_address() -> tuple[str, str] | None:
    """Host and port on which the mpiexec of this run listens, from the command line of its proxy on this host.

    The environment of a process does not name it. The proxy is an ancestor of each process that it started.
    None if there is no such ancestor.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            found = _CONTROL.match(Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
            if found:
                return found[1], found[2]
            # The name of the program, in parentheses, may hold spaces and parentheses.
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return None


def find_mpich(
    environ: Mapping[str, str], control: Callable[[], tuple[str, str] | None] = control_address
) -> ProcessInfo | None:
    """This process as mpiexec describes it; None if it is the only one.

    Process 0 is assumed to run on the host of mpiexec. If a host list puts it elsewhere, FEEDLINE_COORDINATOR
    must name its host.

    Example:
      >>> process = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
      >>> print(find_mpich(process, lambda: ("node1", "41219")))
      process 3 of 4, found MPICH (PMI_RANK=3), coordinator node1:63667, local device 1
    """
    processes = integer(environ, "PMI_SIZE", "MPICH", at_least=1)
    if processes == 1:
        return None
    process = integer(environ, "PMI_RANK", "MPICH")
    local_process, processes_on_host = local_place(environ, *LOCAL, "MPICH")
    return ProcessInfo(
        "MPICH",
        f"PMI_RANK={process}",
        explicit_coordinator(environ) or _coordinator(environ, control(), one_host=processes_on_host == processes),
        processes,
        process,
        own_devices(environ, local_process, processes_on_host),
    )


def _coordinator(environ: Mapping[str, str], control: tuple[str, str] | None, *, one_host: bool) -> str:
    if control is None:
        raise ValueError(
            "MPICH does not tell its processes where they meet (feedline found no hydra_pmi_proxy that started "
            "this one, as in a container); name the host of process 0 and a free port there: mpiexec -genv "
            "FEEDLINE_COORDINATOR node1:61500 …"
        )
    host, port = control
    return f"{'127.0.0.1' if one_host else host}:{agreed_port(environ, f'{host}:{port}')}"
