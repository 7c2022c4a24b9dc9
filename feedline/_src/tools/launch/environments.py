"""The environment variables that give each process of one machine its index, its devices and a coordinator."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from feedline._src.cluster.detect import find

_CPU_DEVICES = "--xla_force_host_platform_device_count"


def process_environments(
    environ: Mapping[str, str],
    *,
    processes: int,
    coordinator: str,
    cpu: bool = False,
    devices_per_process: int | None = None,
    gpus: Sequence[str] = (),
) -> list[dict[str, str]]:
    """The environment variables of each process.

    Args:
      environ: variables that all processes get.
      coordinator: "host:port", where process 0 is to listen.
      cpu: run on the CPU, like JAX_PLATFORMS=cpu in `environ`.
      devices_per_process: on the CPU, the number of devices (None: what XLA_FLAGS says); else the number of GPUs
        (None: an equal share).
      gpus: the names of this machine's GPUs, as in CUDA_VISIBLE_DEVICES; empty if unknown.

    Raises:
      ValueError: there are too few GPUs.

    Example:
      >>> for variables in process_environments({}, processes=2, coordinator="localhost:61500", gpus="0123"):
      ...     print(variables["FEEDLINE_PROCESS"], variables["CUDA_VISIBLE_DEVICES"])
      0 0,1
      1 2,3
    """
    common = {
        # Otherwise Python buffers what it writes into a pipe, and the last output of a killed process is lost.
        "PYTHONUNBUFFERED": "1",
        **environ,
        "FEEDLINE_COORDINATOR": coordinator,
        "FEEDLINE_PROCESSES": str(processes),
        "FEEDLINE_LOCAL_PROCESSES": str(processes),  # They share the cores.
    }
    if cpu or environ.get("JAX_PLATFORMS") == "cpu":
        _split_cpu(common, devices_per_process)
        own: list[dict[str, str]] = [{}] * processes
    else:
        own = _share_gpus(processes, devices_per_process, gpus)
    if any(own):
        common.pop("JAX_LOCAL_DEVICE_IDS", None)  # It counts devices that are not all visible any more.
    return [{**common, **own[process], "FEEDLINE_PROCESS": str(process)} for process in range(processes)]


def _split_cpu(variables: dict[str, str], devices: int | None) -> None:
    variables["JAX_PLATFORMS"] = "cpu"
    if devices is not None:
        flags = variables.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if not flag.startswith(f"{_CPU_DEVICES}=")]
        variables["XLA_FLAGS"] = " ".join([*kept, f"{_CPU_DEVICES}={devices}"])
        variables.pop("JAX_NUM_CPU_DEVICES", None)  # It would override the flag.


def _share_gpus(processes: int, devices: int | None, gpus: Sequence[str]) -> list[dict[str, str]]:
    if devices is None and (processes == 1 or not gpus):
        return [{}] * processes
    share = devices or len(gpus) // processes
    names = gpus or [str(number) for number in range(processes * share)]
    if not 0 < processes * share <= len(names):
        each = f" with {share} GPUs each" if share else ""
        raise ValueError(
            f"Each GPU belongs to one process: {processes} processes{each} were asked for, found "
            f"{len(gpus)} GPUs ({','.join(gpus)}); ask for fewer, or for the CPU with --cpu"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(names[process * share : (process + 1) * share])}
        for process in range(processes)
    ]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the kernel gives to no other program while the block runs.

    The port is bound with SO_REUSEPORT, but not listened on. jax's coordinator, which uses gRPC, sets the same
    option and can therefore listen on it.
    """
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        yield port.getsockname()[1]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES; if it is not set, a number for each GPU's device file."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    files = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    return [str(number) for number in range(len(files))]


def warn_if_nested(environ: Mapping[str, str]) -> None:
    """Says so if this launcher is itself one of several processes, each of which then starts a run of its own."""
    with contextlib.suppress(ValueError):  # its variables do not matter here
        info = find(environ)
        if info is not None and info.process == 0:
            sys.stderr.write(
                f"feedline launch: each of {info.processes} processes, found {info.launcher} ({info.evidence}), "
                "starts a run of its own; for one run, let that launcher start the command itself (see --print)\n"
            )
            sys.stderr.flush()
