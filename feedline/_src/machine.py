"""Facts that Linux reports about this machine: processors, NUMA nodes, GPUs, and limits of control groups.

`root` is the folder that holds proc/, sys/ and dev/; tests pass another one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 60  # cgroups of version 1 write a number near 2^63 for "no limit"


class Topology(NamedTuple):
    """The NUMA nodes of this machine's processors, memory and GPUs."""

    processors: Mapping[int, Set[int]]  # {node: its processors}
    memory: Set[int]  # nodes from which this process may take memory
    accelerators: Mapping[
        str, int
    ]  # {PCI address: node}, in the order of the addresses; -1 if the machine does not report it


def topology(root: Path = Path("/")) -> Topology:
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


class Gpu(NamedTuple):
    """A GPU that this process may open."""

    address: str  # on the PCI bus, as in `Topology.accelerators`
    uuid: str  # "GPU-…", by which CUDA_VISIBLE_DEVICES may name it


def usable_gpus(root: Path = Path("/")) -> list[Gpu]:
    """The GPUs that the NVIDIA driver lists and that this process may open, in the order of their addresses.

    A control group, of Slurm or a container, may hide some GPUs. CUDA numbers GPUs of one model in this order.
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
    """The numbers in a list as Linux writes it: "0-2,8"."""
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


def quota(root: Path = Path("/")) -> float | None:
    """The tightest quota of this process's control group and its ancestors, in processors; None: no quota."""
    return min(filter(None, map(_quota, _folders(root, "cpu"))), default=None)


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes of memory that the machine and the control groups allow. Page cache counts as free."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines if len(words) == 3}
    total, free = found["MemTotal:"], found["MemAvailable:"]
    with contextlib.suppress(OSError, ValueError):  # no control groups, or their form is unknown
        for limit, used in filter(None, map(_memory, _folders(root, "memory"))):
            total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and its ancestors, up to the root of the hierarchy."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup"
        mounts = [base / controllers, base / controller] if controllers else [base]
        mount = next((mount for mount in mounts if mount.is_dir()), None)
        if mount is None:
            continue
        # in a container, `path` may be the group's path on the host and not exist here; `mount` is then the group
        group = mount / path.lstrip("/")
        while group != mount:
            yield group
            group = group.parent
        yield mount


def _quota(folder: Path) -> float | None:
    if version_2 := _words(folder / "cpu.max"):
        return None if version_2[0] == "max" else int(version_2[0]) / int(version_2[1])
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None


def _memory(folder: Path) -> tuple[int, int] | None:
    """(limit, used) in bytes."""
    for limit_file, used_file, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _words(folder / limit_file), _words(folder / used_file)
        if limit and used and limit[0] != "max" and int(limit[0]) < _NO_LIMIT:
            stat = _words(folder / "memory.stat")
            cached = int(stat[stat.index(inactive) + 1]) if inactive in stat else 0
            return int(limit[0]), max(0, int(used[0]) - cached)
    return None


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []
