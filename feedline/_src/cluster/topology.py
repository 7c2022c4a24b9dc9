"""The processors, memory nodes and GPUs of this machine, as Linux describes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple


class Topology(NamedTuple):
    """Which memory nodes (NUMA) hold the processors, the memory and the GPUs of this machine."""

    processors: Mapping[int, Set[int]]  # of each node
    memory: Set[int]  # nodes from which this process may take memory
    accelerators: Mapping[
        str, int
    ]  # by PCI address, in the order of the addresses; -1 if the machine does not say


def topology(root: Path = Path("/")) -> Topology:
    """What Linux says in /sys and /proc. `root` is the folder that has them, for tests."""
    nodes = {
        int(node.name.removeprefix("node")): numbers((node / "cpulist").read_text())
        for node in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    status = (root / "proc/self/status").read_text()
    (memory,) = [line.split()[1] for line in status.splitlines() if line.startswith("Mems_allowed_list:")]
    accelerators = {}
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = (device / "class").read_text().strip()
        nvidia = (device / "vendor").read_text().strip() == "0x10de"
        if nvidia and kind.startswith(("0x0300", "0x0302")):  # graphics and compute, not audio or a bridge
            accelerators[device.name] = int((device / "numa_node").read_text())
    return Topology(nodes, numbers(memory), accelerators)


def cores(processors: Set[int], root: Path = Path("/")) -> list[list[int]]:
    """The processors, grouped by physical core: hyperthreads of one core share it."""
    found: dict[int, list[int]] = {}
    for processor in sorted(processors):
        siblings = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        first = min(numbers(siblings.read_text())) if siblings.is_file() else processor
        found.setdefault(first, []).append(processor)
    return list(found.values())


class Gpu(NamedTuple):
    """A GPU that this process may open."""

    address: str  # on the PCI bus, as in `Topology.accelerators`
    uuid: str  # "GPU-…", by which CUDA_VISIBLE_DEVICES may name it


def usable_gpus(root: Path = Path("/")) -> list[Gpu]:
    """The GPUs that the NVIDIA driver lists and that this process may open, in the order of their addresses.

    A control group, of Slurm or a container, may hide some. CUDA numbers GPUs of one model in this order.
    """
    found = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        lines = (folder / "information").read_text().splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        with contextlib.suppress(OSError):
            os.close(os.open(root / f"dev/nvidia{facts['Device Minor']}", os.O_RDWR))
            found.append(Gpu(folder.name.lower(), facts["GPU UUID"]))
    return found


def numbers(text: str) -> frozenset[int]:
    """The numbers of a list as Linux writes it: "0-2,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def as_list(numbers: Set[int]) -> str:
    """A list of numbers as Linux writes it.

    Example:
      >>> as_list({0, 1, 2, 8})
      '0-2,8'
    """
    firsts = [number for number in sorted(numbers) if number - 1 not in numbers]
    lasts = [number for number in sorted(numbers) if number + 1 not in numbers]
    runs = zip(firsts, lasts, strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
