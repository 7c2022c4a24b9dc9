"""One process of a launch: joins the others, runs every case, and writes what each returned.

A process that hangs writes the stacks of all its threads and ends.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import pickle
import sys
import tempfile
import traceback
from pathlib import Path

_START_S = 180.0
"""How long the start may take: importing jax, and joining the other processes."""


def main(
    address: str, processes: str, process: str, folder: str, before: str, patience_s: str, *modules: str
) -> None:
    faulthandler.dump_traceback_later(_START_S, exit=True)
    import jax

    from .cases import CASES, RUNS_ON, Here
    from .launch import Topology, result_file, result_of
    from .values import CaseFailure, with_shards

    jax.distributed.initialize(address, int(processes), int(process))
    for module in modules:
        importlib.import_module(module)
    topology = Topology(jax.process_count(), jax.local_device_count())
    for name, function in CASES.items():
        if topology not in RUNS_ON.get(name, [topology]):
            continue
        faulthandler.dump_traceback_later(float(patience_s), exit=True)
        with tempfile.TemporaryDirectory() as own:
            earlier = functools.partial(result_of, Path(before), name, 0) if before else lambda: None
            try:
                value = with_shards(function(Here(jax.devices(), Path(own), earlier)))
            except Exception:  # noqa: BLE001  the test of this case fails with this traceback
                value = CaseFailure(traceback.format_exc())
        result_file(Path(folder), name, int(process)).write_bytes(pickle.dumps(value))
    # at exit, jax waits for the others; one that hangs must have the time to write its stacks first
    faulthandler.dump_traceback_later(2 * float(patience_s) + 2, exit=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
