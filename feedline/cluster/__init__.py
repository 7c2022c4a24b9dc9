"""Many processes: what started them, how they find each other, how one machine starts several.

A map::

    join         initialize: this process joins the others
    detect       what started this process             pure, of the environment's variables
      variables    FEEDLINE_* and JAX_* set by hand, and the index of a Kubernetes job
      open_mpi     mpirun
      slurm        srun
      found        what each of them finds
      rendezvous all processes come before jax starts, or are told who did not
    coordination what they tell each other           knows jax's private names
    agree        all build the same feed, or none
      differences  which process differs in what    pure
    monitor      the failure of one ends the others
      gather       what each has to say of a place in a run, for all of them
    stop         a signal to one ends the loop of all, at the same step
    cores        this process's share of the host's cores
    launch       one command as several processes on this machine
      spread       what tells the processes apart      pure, of the environment's variables
      run          from the first start to the last end
      group        no process outlives the launcher
      lines        their output, line by line
      signals      signals as something to wait for

Importing it imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "abort": "cluster.monitor",
    "initialize": "cluster.join",
    "should_stop": "cluster.stop",
}

__all__ = [*_WHERE]

if TYPE_CHECKING:
    from feedline.cluster.join import initialize as initialize
    from feedline.cluster.monitor import abort as abort
    from feedline.cluster.stop import should_stop as should_stop


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'feedline.cluster' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"feedline.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
