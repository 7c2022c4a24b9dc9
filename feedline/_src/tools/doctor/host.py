"""Checks of the host's memory, shared memory, open files, and of the disk that holds the data."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from feedline._src.cluster.cgroups import GroupLimits, limits
from feedline._src.tools.doctor.check import Check, size, unknown

_GIB = 1 << 30
_SHARED_BYTES = 1 * _GIB
_FREE_SHARE = 0.1
_FEW_FILES, _ENOUGH_FILES = 1024, 4096
_READ_BYTES, _READ_S, _BLOCK = 512 << 20, 3.0, 8 << 20
READ_PER_ACCELERATOR = 205e6
"""Bytes per second that ResNet-50 reads on one H100: MLPerf Storage."""


def shared_memory(path: str = "/dev/shm") -> tuple[int, int]:
    """(size, free) in bytes of the file system of shared memory."""
    found = os.statvfs(path)
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def check_shared_memory(total: int, free: int) -> Check:
    """Whether /dev/shm can hold the batches of worker processes."""
    measured = {"total_bytes": total, "free_bytes": free}
    finding = f"/dev/shm has {size(total)}, {size(free)} of them free"
    if free >= _SHARED_BYTES:
        return Check("shared memory", "ok", finding, "", "", measured)
    return Check(
        "shared memory",
        "warning",
        finding,
        "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm; "
        "otherwise mount -o remount,size=8g /dev/shm",
        "worker processes (Reading(workers=...)) pass batches through it, and SIGBUS kills them when it is full; "
        "NCCL uses it between the GPUs of a machine",
        measured,
    )


def check_open_files(soft: int, hard: int) -> Check:
    """The limit of open files."""
    measured = {"soft": soft, "hard": hard}
    finding = f"this process may open {_files(soft)} files"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return Check("open files", "ok", finding, "", "", measured)
    more = hard if 0 < hard < 65536 else 65536
    return Check(
        "open files",
        "warning" if soft < _FEW_FILES else "note",
        finding,
        f"ulimit -n {more} in the shell that starts the job"
        + ("; the hard limit must be raised first, in /etc/security/limits.conf" if 0 < hard <= soft else ""),
        "each mapped file, socket and worker process needs one or more; data in thousands of files fails with "
        "'Too many open files'",
        measured,
    )


def open_files() -> tuple[int, int]:
    """(soft, hard) limit; -1 for no limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


class Memory(NamedTuple):
    """Bytes of main memory: of the machine, available there without swapping, and the limits of the cgroup."""

    total: int
    available: int
    group: GroupLimits = GroupLimits()

    @property
    def usable(self) -> int:
        """What this process can still take: for arrays, or as page cache."""
        limit, used = self.group.memory_bytes, self.group.memory_used_bytes
        return self.available if limit is None else min(self.available, max(0, limit - (used or 0)))

    @property
    def most(self) -> int:
        """What this process can have at most."""
        return min(self.total, self.group.memory_bytes or self.total)


def memory(root: Path = Path("/")) -> Memory:
    """What Linux says in /proc and /sys."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines if len(words) == 3}
    return Memory(found["MemTotal:"], found["MemAvailable:"], limits(root))


def check_memory(found: Memory) -> Check:
    """Free memory of the machine and of the cgroup."""
    measured = {
        "total_bytes": found.total,
        "available_bytes": found.available,
        "cgroup_limit_bytes": found.group.memory_bytes,
        "usable_bytes": found.usable,
    }
    limited = found.group.memory_bytes is not None and found.group.memory_bytes < found.total
    where = "that the cgroup allows" if limited else "of this machine"
    finding = f"{size(found.usable)} of the {size(found.most)} {where} are free"
    if found.usable >= _FREE_SHARE * found.most:
        return Check("free memory", "ok", finding, "", "", measured)
    return Check(
        "free memory",
        "warning",
        finding,
        "end other programs, raise the job's memory limit, or lower batch_size, Reading(buffer=...) and prefetch",
        "the kernel first drops cached pages of the data, so that rows are read from the disk again, and then "
        "kills a process",
        measured,
    )


def check_page_cache(data_bytes: int, found: Memory) -> Check:
    """Whether the data fit into the page cache beside what is in use."""
    measured = {"data_bytes": data_bytes, "usable_bytes": found.usable}
    if data_bytes <= found.usable:
        finding = f"{size(data_bytes)} of data fit into {size(found.usable)} of free memory"
        return Check("page cache", "ok", finding, "", "", measured)
    return Check(
        "page cache",
        "note",
        f"{size(data_bytes)} of data do not fit into {size(found.usable)} of free memory",
        "store narrower dtypes, read adjacent rows together by feedline.Order(shuffle=feedline.Blocks(...)), or "
        "use a machine with more memory",
        "each epoch reads the disk again, in random order if the rows are shuffled",
        measured,
    )


def files_below(path: Path) -> list[Path]:
    """The regular files of a folder and its folders, in a fixed order; or the file itself.

    Raises:
      FileNotFoundError: there is none.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        raise FileNotFoundError(f"--data must name a file, or a folder with files, and {path} is none")
    return files


def read_rate(files: list[Path], most: int = _READ_BYTES, seconds: float = _READ_S) -> tuple[int, float]:
    """(bytes, seconds) of reading files one after the other, past the page cache where the file system allows it.

    At most `most` bytes and about `seconds` seconds.
    """
    done, began = 0, time.perf_counter()
    for file in files:
        for block in _blocks(file):
            done += block
            if done >= most or time.perf_counter() - began > seconds:
                return done, time.perf_counter() - began
    return done, time.perf_counter() - began


def _blocks(file: Path) -> Iterator[int]:
    with file.open("rb", buffering=0) as stream:
        # drops cached pages of this file that are not modified; no effect where none can be dropped (tmpfs)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(_BLOCK)
        while count := stream.readinto(buffer):
            yield count


def check_read_rate(count: int, seconds: float, accelerators: int) -> Check:
    """The rate of reading the data, against what the accelerators of this process may need."""
    if count < 1 << 20:
        return unknown("disk read rate", f"{size(count)} are too little to measure a rate; name larger files")
    rate, needed = count / seconds, READ_PER_ACCELERATOR * max(1, accelerators)
    measured = {"bytes": count, "seconds": seconds, "bytes_per_s": rate, "compared_with_bytes_per_s": needed}
    finding = f"{rate / 1e6:,.0f} MB/s by one thread, in {size(count)}"
    if rate >= needed:
        return Check("disk read rate", "ok", finding, "", "", measured)
    return Check(
        "disk read rate",
        "warning",
        f"{finding}; ResNet-50 on {max(1, accelerators)} H100 reads {needed / 1e6:,.0f} MB/s (MLPerf Storage)",
        "copy the data to a local NVMe disk, read with more threads, or store fewer bytes for each row",
        "rows that are not in the page cache arrive at the rate of the disk, and the accelerators wait for them",
        measured,
    )


def _files(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
