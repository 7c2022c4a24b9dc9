"""The topologies, and how the processes of one are started."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import programs

from feedline._src.tools.launch import reserved_port

from .values import CaseFailure

PATIENCE_S = 180.0
"""How long one case, or the start, may take before the process writes its stacks and ends."""
LIMIT_S = 3600.0
"""How long all cases may take."""


class Topology(NamedTuple):
    """The number of processes, and of CPU devices of each process."""

    processes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.processes}x{self.devices}"


TOPOLOGIES = (Topology(2, 2), Topology(4, 1), Topology(2, 4))
TWO_OR_FOUR = TOPOLOGIES[:2]
"""One topology for each number of processes."""
ALONE = Topology(1, 8)
"""The process that runs the tests."""


def launch(
    topology: Topology, modules: Sequence[str], folder: Path, before: Path | None, patience_s: float = PATIENCE_S
) -> None:
    """Run every case of `modules` in every process of `topology`, and wait until they are done.

    Args:
      modules: names of the modules that register the cases.
      folder: where results (see `result_of`) and the output of each process are written.
      before: the folder of the launch before this one.
      patience_s: per case.
    """
    devices = f"--xla_force_host_platform_device_count={topology.devices}"
    environment = programs.importing(XLA_FLAGS=devices)
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        processes = []
        for i in range(topology.processes):
            output = stack.enter_context(_output(folder, i).open("wb"))
            settings = [address, str(topology.processes), str(i), str(folder), str(before or ""), str(patience_s)]
            command = [sys.executable, "-W", "error", "-m", f"{__package__}.process", *settings, *modules]
            options = {"env": environment, "stdout": output, "stderr": subprocess.STDOUT, "limit_s": LIMIT_S}
            processes.append(stack.enter_context(programs.started(command, **options)))
        for process in processes:
            process.wait()


def result_of(folder: Path, name: str, process: int) -> Any:
    """What a case returned in one process of the launch that wrote to `folder`."""
    try:
        return pickle.loads(result_file(folder, name, process).read_bytes())
    except FileNotFoundError:
        output = _output(folder, process).read_text(errors="replace")
        return CaseFailure(f"it ended before it had done {name}. The end of what it wrote:\n{output[-4000:]}")


def result_file(folder: Path, name: str, process: int) -> Path:
    """The file to which a process writes what a case returned."""
    return folder / f"{name}.{process}.pickle"


def _output(folder: Path, process: int) -> Path:
    return folder / f"process-{process}.txt"
