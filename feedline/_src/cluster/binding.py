"""Binds this process to the processors that are near its GPUs, so that its memory is near them, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from feedline._src.cluster.launchers.launcher import ProcessInfo
from feedline._src.machine import Gpu, Topology, as_list, topology, usable_gpus


def bind(info: ProcessInfo | None, root: Path = Path("/")) -> str | None:
    """Bind this process and its threads, and thereby all threads and processes that it starts later.

    Returns:
      A text: what the process is bound to, or why it could not be bound. None: there was no reason to bind it.
    """
    if not {"", "cuda", "gpu"} & set(os.environ.get("JAX_PLATFORMS", "").split(",")):
        return None  # jax will use no GPU
    try:
        machine, gpus = topology(root), usable_gpus(root)
        allowed = os.sched_getaffinity(0)
    except (OSError, ValueError, KeyError, AttributeError):  # not Linux, or a system that hides its hardware
        return None
    own = own_gpus(os.environ, info.local_devices if info else None, gpus)
    near = nodes_of(own, machine)
    if not near or near >= set(machine.processors):
        return None
    processors = near_processors(machine, near, allowed)
    if not processors:
        return (
            f"not bound: its GPUs are on memory node {as_list(near)}, but it may only use processors "
            f"{as_list(allowed)}, which are on other nodes (srun --gpu-bind=closest)"
        )
    try:
        os.sched_setaffinity(0, processors)
    except OSError as error:
        return f"not bound: {error}"
    for thread in Path("/proc/self/task").iterdir():  # libraries may have started threads on import
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), processors)
    return f"processors {as_list(processors)} of memory node{'s' if len(near) > 1 else ''} {as_list(near)}"


def own_gpus(environ: Mapping[str, str], local_devices: Sequence[int] | None, gpus: Sequence[Gpu]) -> list[str]:
    """The addresses of the GPUs that jax will use in this process; empty if they are unknown."""
    visible, named = list(gpus), environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        visible = []
        for name in map(str.strip, named.split(",")):
            found = [gpu for i, gpu in enumerate(gpus) if name == str(i) or gpu.uuid.startswith(name)]
            if len(found) != 1 or not name:
                return []
            visible += found
    if local_devices is None:
        return [gpu.address for gpu in visible]
    return [visible[device].address for device in local_devices if device < len(visible)]


def nodes_of(gpus: Sequence[str], machine: Topology) -> set[int]:
    """The memory nodes of these GPUs; empty if there are no GPUs, or if the node of one is unknown."""
    found = {machine.accelerators.get(address, -1) for address in gpus}
    return found if found <= set(machine.processors) else set()


def near_processors(machine: Topology, nodes: Set[int], allowed: Set[int]) -> Set[int]:
    """The processors of these memory nodes that this process may use."""
    return frozenset().union(*(machine.processors[node] for node in nodes)) & allowed
