"""Finds this process by the variables of torchrun, which many scripts and operators set too."""

from __future__ import annotations

from collections.abc import Mapping

from feedline._src.cluster.launchers.local import local_place
from feedline._src.cluster.launchers.process_info import ProcessInfo, agreed_port, integer, own_devices
from feedline._src.cluster.launchers.variables import explicit_coordinator

LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_RUN = "TORCHELASTIC_RUN_ID"
_NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def under_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun itself started this process."""
    return bool(environ.get(_RUN))


def has_torch_variables(environ: Mapping[str, str]) -> bool:
    """Whether a variable says how many processes there are, or which one this is.

    A script for srun often sets WORLD_SIZE and MASTER_ADDR for all tasks alike.
    """
    return any(environ.get(name) for name in ("RANK", "WORLD_SIZE"))


def find_torchrun(environ: Mapping[str, str]) -> ProcessInfo | None:
    """This process as torchrun describes it; None if it is the only one.

    Example:
      >>> print(find_torchrun({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}))
      process 1 of 2, found torchrun's variables (RANK=1), coordinator node1:29500, all local devices
    """
    launcher = "torchrun" if under_torchrun(environ) else "torchrun's variables"
    if environ.get("WORLD_SIZE") and integer(environ, "WORLD_SIZE", launcher, at_least=1) == 1:
        return None
    coordinator = explicit_coordinator(environ)
    needed = _NAMES[2:] if coordinator else _NAMES
    if missing := " and ".join(name for name in needed if not environ.get(name)):
        present = ", ".join(f"{name}={environ[name]}" for name in needed if environ.get(name))
        raise ValueError(
            f"{', '.join(needed)} go together, as torchrun sets them: found {present} without {missing}; set "
            f"{missing} too, or unset WORLD_SIZE and RANK to run as one process"
        )
    process = integer(environ, "RANK", launcher)
    devices = None
    if any(environ.get(name) for name in LOCAL):
        devices = own_devices(environ, *local_place(environ, *LOCAL, launcher))
    return ProcessInfo(
        launcher,
        f"RANK={process}",
        coordinator or _coordinator(environ),
        integer(environ, "WORLD_SIZE", launcher),
        process,
        devices,
    )


def _coordinator(environ: Mapping[str, str]) -> str:
    """Process 0 listens on MASTER_PORT. Under torchrun, torchrun itself does, so that another port is needed."""
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if ":" in host and not host.startswith("["):  # An IPv6 address.
        host = f"[{host}]"
    if under_torchrun(environ):
        port = str(agreed_port(environ, f"{environ[_RUN]} {host}:{port}"))
    return f"{host}:{port}"
