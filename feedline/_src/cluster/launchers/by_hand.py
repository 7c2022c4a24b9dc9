"""Variables set by hand, or by `feedline launch`, which also sets FEEDLINE_LOCAL_PROCESSES."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from feedline._src.cluster.launchers.launcher import ProcessInfo, family, integer

DOCS = """\
| environment variables | FEEDLINE_PROCESS or FEEDLINE_PROCESSES, else JAX_PROCESS_ID or JAX_NUM_PROCESSES \
| these | FEEDLINE_COORDINATOR (`feedline launch`: 127.0.0.1 and a free port), JAX_COORDINATOR_ADDRESS |"""
_FAMILIES = (
    ("FEEDLINE_COORDINATOR", "FEEDLINE_PROCESSES", "FEEDLINE_PROCESS"),
    ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)


def started(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for _, *names in _FAMILIES for name in names)


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    names = next(names for names in _FAMILIES if any(environ.get(name) for name in names))
    found = family(environ, "environment variables", *names)
    if found is None or not environ.get("FEEDLINE_LOCAL_PROCESSES"):
        return found
    local = integer(environ, "FEEDLINE_LOCAL_PROCESSES", found.launcher, at_least=1)
    return dataclasses.replace(found, local_process=found.process % local, local_processes=local)
