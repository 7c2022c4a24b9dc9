"""Finds this process among those that mpirun of Open MPI 4 or 5 started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from feedline._src.cluster.launchers.local import local_place
from feedline._src.cluster.launchers.process_info import ProcessInfo, agreed_port, integer, own_devices
from feedline._src.cluster.launchers.variables import explicit_coordinator

LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Version 4: "2074279936.0;tcp://10.0.0.1,10.1.0.1:36691;tcp6://[fd00::2]:36813", where mpirun listens.
_URI = re.compile(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)")
# Version 5: "prterun-<host of mpirun>-<its pid>@<job>".
_NAMESPACE = re.compile(r"prte(?:run)?-(.+)-\d+@\d+")


def under_mpirun(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))


def find_open_mpi(environ: Mapping[str, str]) -> ProcessInfo | None:
    """This process as mpirun describes it; None if it is the only one.

    Process 0 is assumed to run on the host of mpirun. If a host list or a mapping puts it elsewhere,
    FEEDLINE_COORDINATOR must name its host.

    Example:
      >>> process = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1",
      ...            "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
      ...            "PMIX_NAMESPACE": "prterun-node1-4711@1"}
      >>> print(find_open_mpi(process))
      process 1 of 2, found Open MPI (OMPI_COMM_WORLD_RANK=1), coordinator node1:62470, all local devices
    """
    processes = integer(environ, "OMPI_COMM_WORLD_SIZE", "Open MPI", at_least=1)
    if processes == 1:
        return None
    process = integer(environ, "OMPI_COMM_WORLD_RANK", "Open MPI")
    local_process, processes_on_host = local_place(environ, *LOCAL, "Open MPI")
    return ProcessInfo(
        "Open MPI",
        f"OMPI_COMM_WORLD_RANK={process}",
        explicit_coordinator(environ) or _coordinator(environ, one_host=processes_on_host == processes),
        processes,
        process,
        own_devices(environ, local_process, processes_on_host),
    )


def _coordinator(environ: Mapping[str, str], *, one_host: bool) -> str:
    uri, namespace = environ.get("OMPI_MCA_orte_hnp_uri", ""), environ.get("PMIX_NAMESPACE", "")
    of_uri, of_namespace = _URI.search(uri), _NAMESPACE.fullmatch(namespace)
    if one_host:
        host = "127.0.0.1"
    elif of_uri:
        host = of_uri[1] or f"[{of_uri[2]}]"
    elif of_namespace:
        host = of_namespace[1]
    else:
        raise ValueError(
            "Open MPI names the host of mpirun in OMPI_MCA_orte_hnp_uri (version 4) or PMIX_NAMESPACE "
            f"(version 5), found {uri!r} and {namespace!r}; name the host of process 0 and a free port "
            "there: mpirun -x FEEDLINE_COORDINATOR=node1:61500 …"
        )
    return f"{host}:{agreed_port(environ, namespace or uri)}"
