"""torchrun, which sets variables that many scripts and operators set too (`torch_variables`)."""

from __future__ import annotations

from collections.abc import Mapping

from feedline._src.cluster.launchers.launcher import (
    ProcessInfo,
    agreed_port,
    explicit_coordinator,
    integer,
    ranked,
    require_all,
)

DOCS = """\
| torchrun | TORCHELASTIC_RUN_ID | RANK, WORLD_SIZE | MASTER_ADDR and a port from a hash, because torchrun itself \
listens on MASTER_PORT |"""
_RUN = "TORCHELASTIC_RUN_ID"
_RANKS = ("RANK", "WORLD_SIZE")
_LOCAL_RANKS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def started(environ: Mapping[str, str]) -> bool:
    return bool(environ.get(_RUN))


def find(environ: Mapping[str, str]) -> ProcessInfo | None:
    """`torch_variables` calls it, too, for scripts that set the same variables without torchrun."""
    launcher = "torchrun" if started(environ) else "torchrun's variables"
    if environ.get("WORLD_SIZE") and integer(environ, "WORLD_SIZE", launcher, at_least=1) == 1:
        return None
    needed = _RANKS if explicit_coordinator(environ) else ("MASTER_ADDR", "MASTER_PORT", *_RANKS)
    require_all(environ, needed, alone="WORLD_SIZE and RANK")
    if not any(environ.get(name) for name in _LOCAL_RANKS):
        environ = {**environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return ranked(environ, launcher, (*_RANKS, *_LOCAL_RANKS), lambda _: _coordinator(environ))


def _coordinator(environ: Mapping[str, str]) -> str:
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if ":" in host and not host.startswith("["):  # an IPv6 address
        host = f"[{host}]"
    if started(environ):
        port = str(agreed_port(environ, f"{environ[_RUN]} {host}:{port}"))
    return f"{host}:{port}"
