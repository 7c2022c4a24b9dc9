"""What a launcher declares, and what launchers share.

A launcher is one module, and has its place in the tuple of `detect`::

    started(environ) -> bool               whether it started this process
    find(environ) -> ProcessInfo | None    this process among the others; None: it is the only one
    DOCS                                   its line of the table in docs/processes.md, with the columns "found",
                                           "by", "index, number of processes" and "coordinator"
    printed(job) -> str                    optional: what `feedline launch --print` prints for it
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

BY_HAND = "FEEDLINE_COORDINATOR, FEEDLINE_PROCESSES and FEEDLINE_PROCESS"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# Above the ports that Linux assigns to outgoing connections; jax uses the same range.
_FIRST_PORT, _PORTS = 61440, 4096
_DIGITS = 18


class Launcher(Protocol):
    DOCS: str

    def started(self, environ: Mapping[str, str], /) -> bool: ...
    def find(self, environ: Mapping[str, str], /) -> ProcessInfo | None: ...


@dataclasses.dataclass(frozen=True)
class Job:
    """A run on several hosts, in which each process runs `command`."""

    command: Sequence[str]
    hosts: int
    names: Sequence[str]  # of the hosts; empty if the launcher chooses them
    processes: int  # on each host
    gpus: int  # of each process; 0: it runs on the CPU
    variables: Mapping[str, str]  # that the launcher must set


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """One of several processes, as its launcher describes it. Raises `ValueError` if the numbers contradict
    each other."""

    launcher: str
    evidence: str  # the variable with the number of the process, and its value
    coordinator: str  # "host:port", where process 0 listens
    processes: int
    process: int
    local_process: int = 0  # index among the processes of its host
    local_processes: int = 1  # on its host; 1 also if the launcher does not say
    local_devices: tuple[int, ...] | None = None  # indices of the host's GPUs; None: all that the process sees

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not is_number(port) or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"{self.launcher}: the coordinator must be host:port, with a port below 65536, found "
                f"{self.coordinator!r}; set FEEDLINE_COORDINATOR, for example to node1:61500"
            )
        for index, count, where in (
            (self.process, self.processes, ""),
            (self.local_process, self.local_processes, " on its host"),
        ):
            if not 0 <= index < count:
                raise ValueError(
                    f"{self.launcher}: processes must be numbered from 0 to their count less one, found process "
                    f"{index} of {count}{where} ({self.evidence}); pass the variables on as "
                    "the launcher sets them, or correct them"
                )

    @property
    def host(self) -> str:
        """The coordinator's host, without the brackets of an IPv6 address."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    def __str__(self) -> str:
        devices = "all local devices"
        if self.local_devices is not None:
            plural = "s" if len(self.local_devices) > 1 else ""
            devices = f"local device{plural} {', '.join(map(str, self.local_devices))}"
        return (
            f"process {self.process} of {self.processes}, found {self.launcher} ({self.evidence}), "
            f"coordinator {self.coordinator}, {devices}"
        )


def ranked(
    environ: Mapping[str, str],
    launcher: str,
    names: tuple[str, str, str, str],
    coordinator: Callable[[bool], str],
) -> ProcessInfo | None:
    """The process that four variables describe: its index and the number of processes, in the run and on the host.

    `coordinator` returns where the processes meet; its argument says whether all are on one host. The result is
    None for the only process of a run.
    """
    index, count, local_index, local_count = names
    processes = integer(environ, count, launcher, at_least=1)
    if processes == 1:
        return None
    process = integer(environ, index, launcher)
    place = integer(environ, local_index, launcher), integer(environ, local_count, launcher, at_least=1)
    address = explicit_coordinator(environ) or coordinator(place[1] == processes)
    devices = own_devices(environ, *place)
    return ProcessInfo(launcher, f"{index}={process}", address, processes, process, *place, devices)


def family(
    environ: Mapping[str, str], launcher: str, coordinator: str, processes: str, process: str
) -> ProcessInfo | None:
    """The process that these three variables describe; None if it is the only one."""
    if environ.get(processes) and integer(environ, processes, launcher, at_least=1) == 1:
        return None
    require_all(environ, (coordinator, processes, process), alone="all of them")
    index, count = integer(environ, process, launcher), integer(environ, processes, launcher)
    return ProcessInfo(launcher, f"{process}={index}", environ[coordinator], count, index)


def require_all(environ: Mapping[str, str], names: Sequence[str], *, alone: str) -> None:
    """`ValueError` if one of these variables is not set. `alone` says which to unset for a single process."""
    if missing := " and ".join(name for name in names if not environ.get(name)):
        present = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
        raise ValueError(
            f"{', '.join(names)} go together: found {present} without {missing}; set {missing} too, or "
            f"unset {alone} to run as one process"
        )


def explicit_coordinator(environ: Mapping[str, str]) -> str | None:
    """The coordinator that a variable names; it overrides any launcher's."""
    return environ.get("FEEDLINE_COORDINATOR") or environ.get("JAX_COORDINATOR_ADDRESS")


def integer(environ: Mapping[str, str], name: str, launcher: str, *, at_least: int = 0) -> int:
    """The variable's value as an index or a count. `ValueError` if it is not set, no integer, or too small."""
    value = environ.get(name)
    if not value:
        raise ValueError(
            f"{launcher} sets {name} for each process, but it is not set here; pass it on to this "
            f"process (a container gets only variables that you name), or set {BY_HAND}"
        )
    if not (is_number(value) and int(value) >= at_least):
        raise ValueError(f"{name} must be an integer of at least {at_least}, found {value!r}; correct it")
    return int(value)


def is_number(value: str) -> bool:
    """Whether the value is a decimal number of at most 18 digits; `int` refuses thousands of digits."""
    return value.isascii() and value.isdecimal() and len(value) <= _DIGITS


def agreed_port(environ: Mapping[str, str], job: str) -> int:
    """JAX_COORDINATOR_PORT, or a hash of the job's name, so jobs with neighbouring numbers get unrelated ports."""
    if environ.get("JAX_COORDINATOR_PORT"):
        return integer(environ, "JAX_COORDINATOR_PORT", "The environment")
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def own_devices(environ: Mapping[str, str], local_process: int, local_processes: int) -> tuple[int, ...] | None:
    """Indices of the host's GPUs that belong to this process: an equal share of the visible ones.

    If their number is unknown, a process gets one, as in jax. None if there is nothing to divide: the process is
    alone on its host, the launcher has already divided the GPUs, or JAX_LOCAL_DEVICE_IDS is set.
    """
    if local_processes == 1 or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = next((environ[name] for name in _VISIBLE if name in environ), None)
    if visible is None:
        return (local_process,)
    share = len(visible.split(",")) // local_processes
    return tuple(range(local_process * share, (local_process + 1) * share)) or None
