"""Joins the processes of a run, whatever started them, and launches several processes on one machine.

A map::

    join           initialize: this process joins the others
    detect         what started this process, from the environment variables
      launchers/     what srun, mpirun, torchrun and others tell their processes, and the commands that start them
    rendezvous     waits for all processes before jax starts, or names those that are missing
    cores          this process's share of the host's cores
    binding        binds the process to the processors near its GPUs
      topology       processors, memory nodes and GPUs of the host
    launch         runs one command as several processes on this machine
      environments   the environment variables of each process     pure
      supervisor     waits for output, signals and ends of the processes
      process_group  no process outlives the launcher
      lines          prefixes each line of output with its process
      signals        delivers signals through a socket

`feedline.agreement` is what processes use to communicate once they have joined.
Importing this package imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "abort": "agreement.monitor",
    "initialize": "cluster.join",
    "should_stop": "agreement.stop",
}

__all__ = [*_WHERE]

if TYPE_CHECKING:
    from feedline.agreement.monitor import abort as abort
    from feedline.agreement.stop import should_stop as should_stop
    from feedline.cluster.join import initialize as initialize


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'feedline.cluster' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"feedline.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
