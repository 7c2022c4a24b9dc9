"""The limits that control groups (cgroups, versions 1 and 2) set for this process: processors and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2^63 for "no limit"."""


class GroupLimits(NamedTuple):
    """The tightest limits of the group of a process and of the groups around it; None: no limit."""

    processors: float | None = None  # the quota
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None  # without page cache that can be dropped at once


def limits(root: Path = Path("/")) -> GroupLimits:
    """The limits of this process. `root` is the folder that has proc/ and sys/, for tests."""
    quotas = filter(None, map(_quota, _folders(root, "cpu")))
    memories = filter(None, map(_memory, _folders(root, "memory")))
    return GroupLimits(min(quotas, default=None), *min(memories, default=(None, None)))


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
    for line in (root / "proc/self/cgroup").read_text().splitlines():
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
