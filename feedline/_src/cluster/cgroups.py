"""The limits that control groups (cgroups, versions 1 and 2) set for this process: processors and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2^63 for "no limit"."""


class GroupLimits(NamedTuple):
    """The tightest limits of the group of a process and of the groups around it.

    Attributes:
      processors: the quota, as a number of processors; None without one.
      memory_bytes: the limit; None without one.
      memory_used_bytes: what counts against that limit, without page cache that can be dropped at once.
    """

    processors: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None


def limits(root: Path = Path("/")) -> GroupLimits:
    """The limits of this process.

    Args:
      root: the folder that has proc/ and sys/, for tests.
    """
    processors: float | None = None
    memory: tuple[int, int] | None = None
    for folder in _folders(root, "cpu"):
        quota = _quota(folder)
        processors = min(filter(None, (processors, quota)), default=None)
    for folder in _folders(root, "memory"):
        found = _memory(folder)
        memory = min(filter(None, (memory, found)), default=None)
    return GroupLimits(processors, *(memory or (None, None)))


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes for this process, of the machine or its group. Page cache counts as free."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines if len(words) == 3}
    total, free = found["MemTotal:"], found["MemAvailable:"]
    with contextlib.suppress(OSError, ValueError):  # no cgroups, or in a form that is not known
        group = limits(root)
        if group.memory_bytes is not None:
            total = min(total, group.memory_bytes)
            free = min(free, max(0, group.memory_bytes - (group.memory_used_bytes or 0)))
    return total, free


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that hold this process, from its own to the root of the hierarchy."""
    lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup"
        mounts = [base / controllers, base / controller] if controllers else [base]
        mount = next((mount for mount in mounts if mount.is_dir()), None)
        if mount is None:
            continue
        # a container may see its own group as the root of the hierarchy, while the path is the host's
        group = mount / path.lstrip("/")
        while group != mount:
            yield group
            group = group.parent
        yield mount


def _quota(folder: Path) -> float | None:
    version_2 = _words(folder / "cpu.max")
    if version_2:
        return None if version_2[0] == "max" else int(version_2[0]) / int(version_2[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def _memory(folder: Path) -> tuple[int, int] | None:
    """(limit, used) in bytes."""
    for limit_file, used_file, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and used is not None and limit < _NO_LIMIT:
            stat = _words(folder / "memory.stat")
            cached = int(stat[stat.index(inactive) + 1]) if inactive in stat else 0
            return limit, max(0, used - cached)
    return None


def _number(file: Path) -> int | None:
    words = _words(file)
    return int(words[0]) if words and words[0].lstrip("-").isdecimal() else None


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []
