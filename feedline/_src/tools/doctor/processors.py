"""Checks of processors: how many this process really has, and whether they are near its memory and its GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from feedline._src.cluster.cgroups import limits
from feedline._src.cluster.cores import own_cores
from feedline._src.cluster.topology import Topology
from feedline._src.tools.doctor.check import Check

_LEAST_THREADS, _MOST_THREADS = 2, 16
"""Bounds of the default of `Reading(threads=None)`."""


class Processors(NamedTuple):
    """The processors of this machine that this process may use.

    Attributes:
      present: processors of the machine.
      allowed: those on which this process may run (its affinity).
      quota: processors that the cgroup grants; None without a limit.
      reading_threads: threads that a feed starts by default.
    """

    present: int
    allowed: frozenset[int]
    quota: float | None
    reading_threads: int


def processors(root: Path = Path("/")) -> Processors:
    """What this process may use. `root` is the folder that has proc/ and sys/, for tests."""
    present = os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(present)
    threads = min(max(own_cores(), _LEAST_THREADS), _MOST_THREADS)
    return Processors(present, frozenset(allowed), limits(root).processors, threads)


def check_threads(found: Processors) -> Check:
    """Threads against the processors that this process really has."""
    name, usable = "threads and processors", usable_count(found)
    measured = {
        "present": found.present,
        "allowed": len(found.allowed),
        "quota": found.quota,
        "reading_threads": found.reading_threads,
    }
    if found.quota is not None and math.ceil(found.quota) < len(found.allowed):
        return Check(
            name,
            "warning",
            f"the cgroup grants {found.quota:g} processors, but libraries count {len(found.allowed)}; a "
            f"feed starts {found.reading_threads} reading threads by default",
            f"grant the job more processors, or set Reading(threads={usable}) and OMP_NUM_THREADS={usable}",
            "when all threads together have used the quota, the kernel stops all of them until the next period of "
            "0.1 s, the training thread as well",
            measured,
        )
    if usable == 1:
        return Check(
            name,
            "warning",
            f"this process may use 1 of {found.present} processors",
            "give the process more processors: srun --cpus-per-task, taskset, docker run --cpus",
            "reading, placement and the training thread share that processor, so they cannot overlap",
            measured,
        )
    return Check(
        name, "ok", f"{usable} processors, {found.reading_threads} reading threads by default", "", "", measured
    )


def usable_count(found: Processors) -> int:
    """How many processors the affinity and the quota leave, at least 1."""
    quota = len(found.allowed) if found.quota is None else math.ceil(found.quota)
    return max(1, min(len(found.allowed), quota))


def check_affinity(allowed: Set[int], found: Topology) -> Check:
    """Whether the processors of this process are on the memory nodes of its memory and of its GPUs."""
    name = "affinity of processors and memory"
    own = {node for node, processors in found.processors.items() if processors & allowed}
    far = {address: node for address, node in found.accelerators.items() if node >= 0 and node not in own}
    measured = {
        "nodes": sorted(found.processors),
        "processor_nodes": sorted(own),
        "memory_nodes": sorted(found.memory),
        "accelerator_nodes": dict(found.accelerators),
    }
    why = (
        "each copy between two nodes passes the link between the processor sockets, which is slower and is shared"
    )
    if len(found.processors) < 2:
        return Check(name, "ok", "this machine has one memory node", "", "", measured)
    if own and not own & set(found.memory):
        return Check(
            name,
            "warning",
            f"the processors are on memory node {_listed(own)}, memory comes from node {_listed(found.memory)}",
            f"bind both to one node: numactl --cpunodebind={_listed(own)} --membind={_listed(own)}",
            why,
            measured,
        )
    if far and len(far) == len(found.accelerators):
        (address, node), *_ = far.items()
        return Check(
            name,
            "warning",
            f"the processors are on memory node {_listed(own)}, and all GPUs on others (GPU {address} on {node})",
            f"bind the process to the node of its GPUs: numactl --cpunodebind={node}, or srun --gpu-bind=closest",
            why,
            measured,
        )
    if far:
        return Check(
            name,
            "note",
            f"{len(far)} of {len(found.accelerators)} GPUs are on other memory nodes than the processors, "
            f"{_listed(own)}",
            "with one process for each GPU, bind each to the node of its GPU: srun --gpu-bind=closest",
            why,
            measured,
        )
    return Check(name, "ok", f"processors on memory node {_listed(own)}", "", "", measured)


def _listed(nodes: Set[int]) -> str:
    return ",".join(map(str, sorted(nodes)))
