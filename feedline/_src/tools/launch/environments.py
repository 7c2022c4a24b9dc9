"""The environment variables that give each process of one machine its index, its devices and a coordinator."""

from __future__ import annotations

import contextlib
import glob
import socket
from collections.abc import Iterator, Mapping

from feedline._src.tools.cli.options import flags_for_cpu_devices


def process_environments(
    environ: Mapping[str, str],
    *,
    processes: int,
    coordinator: str,
    cpu: bool = False,
    devices_per_process: int | None = None,
) -> list[dict[str, str]]:
    """The environment variables of each process. `ValueError` if there are too few GPUs.

    Example:
      >>> for variables in process_environments(
      ...     {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, processes=2, coordinator="localhost:61500"
      ... ):
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
    gpus, share = list[str](), 0
    if cpu or environ.get("JAX_PLATFORMS") == "cpu":
        common["JAX_PLATFORMS"] = "cpu"
        if devices_per_process is not None:
            common["XLA_FLAGS"] = flags_for_cpu_devices(environ.get("XLA_FLAGS", ""), devices_per_process)
            common.pop("JAX_NUM_CPU_DEVICES", None)  # It would override the flag.
    elif devices_per_process is not None or processes > 1:
        gpus = visible_gpus(environ)
        share = devices_per_process or len(gpus) // processes
        if processes * share > len(gpus) or (gpus and not share):
            raise ValueError(
                f"Each GPU belongs to one process: {processes} processes with {share or 1} GPUs each were asked "
                f"for, found {len(gpus)} GPUs ({','.join(gpus)}); ask for fewer, or for the CPU with --cpu"
            )
    environments = []
    for process in range(processes):
        own = {**common, "FEEDLINE_PROCESS": str(process)}
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[process * share : (process + 1) * share])
            own.pop("JAX_LOCAL_DEVICE_IDS", None)  # It counts devices that are not all visible any more.
        environments.append(own)
    return environments


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES; if it is not set, a number for each GPU's device file."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the kernel gives to no other program while the block runs.

    It is bound with SO_REUSEPORT, as by jax's coordinator, which can therefore listen on it.
    """
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind(("127.0.0.1", 0))
        yield port.getsockname()[1]
