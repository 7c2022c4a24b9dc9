"""What a launcher says about this process: its index, the number of processes, the coordinator, its devices."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# Above the range from which Linux takes ports for outgoing connections, as jax does.
_FIRST_PORT, _PORTS = 61440, 4096
_DIGITS = 18


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """One of several processes, as its launcher describes it.

    Attributes:
      launcher: what started the process, e.g. "Slurm".
      evidence: the variable that shows it, with its value.
      coordinator: "host:port", where process 0 listens.
      processes: number of processes, at least 2.
      process: index of this process, 0 ≤ process < processes.
      local_devices: indices of the host's GPUs that belong to this process. None: all visible ones. CPU
        devices always belong to the process that sees them.

    Example:
      >>> print(ProcessInfo("Slurm", "SLURM_PROCID=1", "node1:61500", 4, 1, (1,)))
      process 1 of 4, found Slurm (SLURM_PROCID=1), coordinator node1:61500, local device 1
    """

    launcher: str
    evidence: str
    coordinator: str
    processes: int
    process: int
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not is_number(port) or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"{self.launcher}: the coordinator is host:port, with a port below 65536, found "
                f"{self.coordinator!r}; set FEEDLINE_COORDINATOR, for example to node1:61500"
            )
        if not 0 <= self.process < self.processes:
            raise ValueError(
                f"{self.launcher}: the processes are numbered from 0 to their count less one, found "
                f"process {self.process} of {self.processes} ({self.evidence}); number them 0 to "
                f"{self.processes - 1}, or raise the count"
            )

    @property
    def host(self) -> str:
        """The coordinator's host, without the brackets of an IPv6 address."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    def __str__(self) -> str:
        match self.local_devices:
            case None:
                devices = "all local devices"
            case (only,):
                devices = f"local device {only}"
            case several:
                devices = f"local devices {', '.join(map(str, several))}"
        return (
            f"process {self.process} of {self.processes}, found {self.launcher} ({self.evidence}), "
            f"coordinator {self.coordinator}, {devices}"
        )


def integer(environ: Mapping[str, str], name: str, launcher: str, *, at_least: int = 0) -> int:
    """The variable's value as an index or a count. `ValueError` if it is not set, no integer, or too small."""
    value = environ.get(name)
    if not value:
        raise ValueError(
            f"{launcher} sets {name} for each process, but it is not set here; pass it on to this "
            "process (a container needs it named), or set FEEDLINE_COORDINATOR, FEEDLINE_PROCESSES "
            "and FEEDLINE_PROCESS"
        )
    if not (is_number(value) and int(value) >= at_least):
        raise ValueError(f"{name} is an integer of at least {at_least}, found {value!r}; correct it")
    return int(value)


def is_number(value: str) -> bool:
    """Whether the value is a decimal number of at most 18 digits; `int` refuses one of thousands of digits."""
    return value.isascii() and value.isdecimal() and len(value) <= _DIGITS


def agreed_port(environ: Mapping[str, str], job: str) -> int:
    """A port that every process of the job computes alike: JAX_COORDINATOR_PORT, or a hash of the job's name.

    Jobs and steps with neighbouring numbers get unrelated ports, so that two of them may run on one host.
    """
    if environ.get("JAX_COORDINATOR_PORT"):
        return integer(environ, "JAX_COORDINATOR_PORT", "The environment")
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def own_devices(environ: Mapping[str, str], local_process: int, processes_on_host: int) -> tuple[int, ...] | None:
    """Indices of the host's GPUs that belong to this process; each GPU belongs to one process.

    Args:
      local_process: index of this process among the processes on its host.
      processes_on_host: number of processes on its host.

    Returns:
      None if there is nothing to divide: the process is the only one on its host, the launcher has already
      divided the GPUs, or JAX_LOCAL_DEVICE_IDS is set. One GPU, with the index of the process on its host, if
      the number of GPUs is unknown (jax does the same). Else an equal share of the visible GPUs.

    Example:
      >>> own_devices({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, local_process=1, processes_on_host=2)
      (2, 3)
    """
    if processes_on_host == 1 or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = next((environ[name] for name in _VISIBLE if name in environ), None)
    if visible is None:
        return (local_process,)
    share = len(visible.split(",")) // processes_on_host
    return tuple(range(local_process * share, (local_process + 1) * share)) or None
