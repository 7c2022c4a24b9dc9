"""mpirun of Open MPI 4 or 5."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from feedline._src.cluster.launchers.launcher import Job, ProcessInfo, agreed_port, ranked

DOCS = """\
| Open MPI | OMPI_COMM_WORLD_RANK or OMPI_COMM_WORLD_SIZE | both | the host of mpirun (OMPI_MCA_orte_hnp_uri in \
version 4, PMIX_NAMESPACE in 5), a port from a hash |"""
_NAMES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Version 4: "2074279936.0;tcp://10.0.0.1,10.1.0.1:36691;tcp6://[fd00::2]:36813", where mpirun listens.
_URI = re.compile(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)")
# Version 5: "prterun-<host of mpirun>-<its pid>@<job>".
_NAMESPACE = re.compile(r"prte(?:run)?-(.+)-\d+@\d+")


def started(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in _NAMES[:2])


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    """If process 0 is not on the host of mpirun, FEEDLINE_COORDINATOR must name the host of process 0."""
    return ranked(environ, "Open MPI", _NAMES, lambda one_host: _coordinator(environ, one_host))


def _coordinator(environ: Mapping[str, str], one_host: bool) -> str:
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
            "Open MPI must name mpirun's host in OMPI_MCA_orte_hnp_uri (version 4) or PMIX_NAMESPACE "
            f"(version 5), got {uri!r} and {namespace!r}; name the host of process 0 and a free port "
            "there: mpirun -x FEEDLINE_COORDINATOR=node1:61500 …"
        )
    return f"{host}:{agreed_port(environ, namespace or uri)}"


def printed(job: Job) -> str:
    """The mpirun command, to be run on the first host or within a job of Slurm."""
    words = ["mpirun", "-n", str(job.hosts * job.processes)]
    if job.names:
        words += ["--host", ",".join(f"{name}:{job.processes}" for name in job.names)]
    # By default mpirun binds each process to one core, and waits 1 s after SIGTERM, too short to save.
    words += ["--map-by", f"ppr:{job.processes}:node", "--bind-to", "none", "--tag-output"]
    words += ["--mca", "odls_base_sigkill_timeout", "15"]
    for name, value in job.variables.items():
        words += ["-x", f"{name}={value}"]
    return shlex.join([*words, *job.command])
