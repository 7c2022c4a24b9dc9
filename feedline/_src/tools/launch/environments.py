"""The environment variables that give each process of one machine its index, its devices and a coordinator."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence

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
    """The environment variables of each process; `gpus` are the names of this machine's, empty if unknown.

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
    own: list[dict[str, str]] = [{} for _ in range(processes)]
    if cpu or environ.get("JAX_PLATFORMS") == "cpu":
        common["JAX_PLATFORMS"] = "cpu"
        if devices_per_process is not None:
            flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if not flag.startswith(_CPU_DEVICES)]
            common["XLA_FLAGS"] = " ".join([*flags, f"{_CPU_DEVICES}={devices_per_process}"])
            common.pop("JAX_NUM_CPU_DEVICES", None)  # It would override the flag.
    elif devices_per_process is not None or (processes > 1 and gpus):
        share = devices_per_process or len(gpus) // processes
        names = gpus or [str(number) for number in range(processes * share)]
        if not 0 < processes * share <= len(names):
            each = f" with {share} GPUs each" if share else ""
            raise ValueError(
                f"Each GPU belongs to one process: {processes} processes{each} were asked for, found "
                f"{len(gpus)} GPUs ({','.join(gpus)}); ask for fewer, or for the CPU with --cpu"
            )
        for process in range(processes):
            own[process]["CUDA_VISIBLE_DEVICES"] = ",".join(names[process * share : (process + 1) * share])
        common.pop("JAX_LOCAL_DEVICE_IDS", None)  # It counts devices that are not all visible any more.
    return [{**common, **own[process], "FEEDLINE_PROCESS": str(process)} for process in range(processes)]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the kernel gives to no other program while the block runs.

    It is bound with SO_REUSEPORT, as by jax's coordinator, which can therefore listen on it.
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
