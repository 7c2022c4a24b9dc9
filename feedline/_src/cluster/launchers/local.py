"""The place of a process among those of its host, from two variables of its launcher."""

from __future__ import annotations

from collections.abc import Mapping

from feedline._src.cluster.launchers.process_info import integer


def local_place(environ: Mapping[str, str], index: str, count: str, launcher: str) -> tuple[int, int]:
    """The index of this process among those of its host, and their number.

    Example:
      >>> local_place({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "torchrun")
      (3, 8)
    """
    local_process = integer(environ, index, launcher)
    processes = integer(environ, count, launcher, at_least=1)
    if local_process >= processes:
        raise ValueError(
            f"{launcher} numbers the processes of a host from 0 to {count} less one, found {index}="
            f"{local_process} and {count}={processes}; pass both on as the launcher has set them"
        )
    return local_process, processes
