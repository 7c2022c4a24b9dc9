"""Many processes: what started them, how they find each other, how one machine starts several.

A map::

    join         initialize: this process joins the others
    detect       what started this process             pure, of the environment's variables
      variables    FEEDLINE_* and JAX_* set by hand, and the index of a Kubernetes job
      open_mpi     mpirun
      slurm        srun
      found        what each of them finds
    rendezvous   all processes come before jax starts, or an error names the absent
    cores        this process's share of the host's cores
    launch       one command as several processes on this machine
      spread       what tells the processes apart      pure, of the environment's variables
      run          from the first start to the last end
      group        no process outlives the launcher
      lines        their output, line by line
      signals      signals as something to wait for

What processes tell each other once they have joined stands in `feedline.agreement`.
Importing it imports no jax.
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
