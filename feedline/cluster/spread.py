"""What tells the processes of one machine apart: the environment's variables of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_CPU_DEVICES = "--xla_force_host_platform_device_count"


def spread(
    environ: Mapping[str, str],
    *,
    processes: int,
    coordinator: str,
    cpu: bool = False,
    devices_per_process: int | None = None,
    gpus: Sequence[str] = (),
) -> list[dict[str, str]]:
    """The variables of each process: its place among the others, and its devices.

    Args:
      environ: what all of them start from.
      coordinator: "host:port", where process 0 is to listen.
      cpu: run on the CPU, as JAX_PLATFORMS=cpu in `environ` does too.
      devices_per_process: on the CPU, how many devices it is split into (None: as XLA_FLAGS says);
        else how many GPUs each process gets (None: an equal share).
      gpus: the names of this machine's GPUs, as CUDA_VISIBLE_DEVICES writes them; empty if unknown.

    Raises:
      ValueError: there are too few GPUs.

    Example:
      >>> for variables in spread({}, processes=2, coordinator="localhost:61500", gpus="0123"):
      ...     print(variables["FEEDLINE_PROCESS"], variables["CUDA_VISIBLE_DEVICES"])
      0 0,1
      1 2,3
    """
    common = {
        # Python writes whole blocks into a pipe otherwise; what a killed process said last is lost.
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
        common.pop("JAX_LOCAL_DEVICE_IDS", None)  # Numbers what was visible before.
    return [{**common, **own[process], "FEEDLINE_PROCESS": str(process)} for process in range(processes)]


def _split_cpu(variables: dict[str, str], devices: int | None) -> None:
    variables["JAX_PLATFORMS"] = "cpu"
    if devices is not None:
        flags = variables.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if not flag.startswith(f"{_CPU_DEVICES}=")]
        variables["XLA_FLAGS"] = " ".join([*kept, f"{_CPU_DEVICES}={devices}"])
        variables.pop("JAX_NUM_CPU_DEVICES", None)  # Goes before the flag.


def _share_gpus(processes: int, devices: int | None, gpus: Sequence[str]) -> list[dict[str, str]]:
    if devices is None and (processes == 1 or not gpus):
        return [{}] * processes
    share = devices or len(gpus) // processes
    # Unknown GPUs are numbered.
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
