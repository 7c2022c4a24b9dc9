"""Checks of this machine: processors, memory, the disk, settings and versions. devices.py has the accelerators.

`machine_checks` measures. The functions `check_...` take the measured values, so that a test can give them any.
"""

from __future__ import annotations

import math
import os
import re
import resource
import time
from collections.abc import Iterator, Mapping, Set
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from feedline._src.cluster.cgroups import GroupLimits, limits
from feedline._src.cluster.cores import own_cores
from feedline._src.cluster.topology import Topology, as_list, topology
from feedline._src.tools.cli.terminal import in_bytes
from feedline._src.tools.doctor import devices
from feedline._src.tools.doctor.check import Check, Severity, attempt, judged, unknown

_SHARED_BYTES = 1 << 30
_FREE_SHARE = 0.1
_FEW_FILES, _ENOUGH_FILES = 1024, 4096
_READ_BYTES, _READ_S, _BLOCK = 512 << 20, 3.0, 8 << 20
_READ_PER_ACCELERATOR = 205e6
"""Bytes per second that ResNet-50 reads on one H100: MLPerf Storage."""
_PLUGINS = {12: "jax-cuda12-plugin", 13: "jax-cuda13-plugin"}
_DRIVERS = {12: "525.60.13", 13: "580"}
"""The oldest driver on Linux for each major version of CUDA, from `_INSTALLATION_PAGE`."""
_INSTALLATION_PAGE = "https://docs.jax.dev/en/latest/installation.html"
_MEMORY_PAGE = "https://docs.jax.dev/en/latest/gpu_memory_allocation.html"
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_ALLOCATION = (*_FRACTIONS, "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE")
_MAX_FRACTION = 0.95
_FAULTY_GRAIN = ("0.2.18",)
"""Versions with the fault that https://github.com/google/grain/issues/1372 describes."""


def machine_checks(environ: Mapping[str, str], data: Path | None) -> Iterator[Check]:
    """Check the host first, then the devices. It uses the devices of this process.

    Args:
      environ: the environment of the job.
      data: a file or folder with the job's data; None: nothing is read.
    """
    installed = _installed("grain", "jaxlib", *_PLUGINS.values())
    platforms = environ.get("JAX_PLATFORMS", "")
    allowed, threads = allowed_processors(), min(max(own_cores(), 2), 16)  # the default of Reading(threads=None)
    yield attempt(
        "threads and processors",
        lambda: check_threads(os.cpu_count() or 1, len(allowed), limits().processors, threads),
    )
    yield attempt("affinity of processors and memory", lambda: check_affinity(allowed, topology()))
    yield attempt("free memory", lambda: check_memory(memory()))
    yield attempt("shared memory", lambda: check_shared_memory(*shared_memory()))
    yield attempt("open files", lambda: check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)))
    yield from _data_checks(data)
    yield check_preallocation(environ)
    yield check_x64(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)
    yield attempt("versions with known faults", lambda: check_versions(installed))
    yield attempt("NVIDIA driver", lambda: check_driver(driver_version(), installed))
    yield attempt(
        "devices that JAX uses",
        lambda: check_devices(jax.default_backend(), gpu_count(), installed, platforms),
    )
    yield attempt(
        "constant operands on the CPU",
        lambda: check_constant_operand(constant_operand_is_right(), installed["jaxlib"], jax.default_backend()),
    )
    yield from devices.device_checks()


def _data_checks(data: Path | None) -> Iterator[Check]:
    if data is None:
        for name in ("page cache", "disk read rate"):
            yield unknown(name, "no data were named; --data FILE or --data FOLDER does")
        return
    files = files_below(data)
    total = sum(file.stat().st_size for file in files)
    accelerators = 0 if jax.default_backend() == "cpu" else jax.local_device_count()
    yield attempt("page cache", lambda: check_page_cache(total, memory().usable))
    yield attempt("disk read rate", lambda: check_read_rate(*read_rate(files), accelerators))


def allowed_processors() -> frozenset[int]:
    """The processors on which this process may run (its affinity)."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def usable(allowed: int, quota: float | None) -> int:
    """How many processors the affinity and the quota of the cgroup leave, at least 1."""
    return max(1, min(allowed, math.ceil(quota or allowed)))


def check_threads(present: int, allowed: int, quota: float | None, threads: int) -> Check:
    """Compare threads with the processors that this process really has.

    Args:
      present: processors of the machine.
      allowed: processors on which this process may run.
      quota: processors that the cgroup grants; None without a limit.
      threads: reading threads that a feed starts by default.
    """
    count = usable(allowed, quota)
    finding = f"{count} processors, {threads} reading threads by default"
    fix = "give the process more processors: srun --cpus-per-task, taskset, docker run --cpus"
    why = "reading, placement and the training thread share that processor, so they cannot overlap"
    if count == 1:
        finding = f"this process may use 1 of {present} processors"
    if count < allowed:
        finding = (
            f"the cgroup grants {quota:g} processors, but libraries count {allowed}; a feed starts {threads} "
            "reading threads by default"
        )
        fix = f"grant the job more processors, or set Reading(threads={count}) and OMP_NUM_THREADS={count}"
        why = (
            "when all threads together have used the quota, the kernel stops all of them until the next period of "
            "0.1 s, the training thread as well"
        )
    return judged(
        "threads and processors",
        "warning" if count == 1 or count < allowed else "ok",
        finding,
        fix,
        why,
        present=present,
        allowed=allowed,
        quota=quota,
        reading_threads=threads,
    )


def check_affinity(allowed: Set[int], found: Topology) -> Check:
    """Whether the processors of this process are on the memory nodes (NUMA) of its memory and of its GPUs."""
    own = {node for node, there in found.processors.items() if there & allowed}
    far = {gpu: node for gpu, node in found.accelerators.items() if node >= 0 and node not in own}
    here = f"the processors are on memory node {as_list(own)}"
    severity: Severity = "ok"
    finding, fix = here, ""
    if len(found.processors) < 2:
        finding = "this machine has one memory node"
    elif own and not own & set(found.memory):
        finding, severity = f"{here}, memory comes from node {as_list(found.memory)}", "warning"
        fix = f"bind both to one node: numactl --cpunodebind={as_list(own)} --membind={as_list(own)}"
    elif far and len(far) == len(found.accelerators):
        (gpu, node), *_ = far.items()
        finding, severity = f"{here}, and all GPUs on others (GPU {gpu} on {node})", "warning"
        fix = f"bind the process to the node of its GPUs: numactl --cpunodebind={node}, or srun --gpu-bind=closest"
    elif far:
        finding, severity = f"{here}, and {len(far)} of {len(found.accelerators)} GPUs on others", "note"
        fix = "with one process for each GPU, bind each to the node of its GPU: srun --gpu-bind=closest"
    return judged(
        "affinity of processors and memory",
        severity,
        finding,
        fix,
        "each copy between two nodes passes the link between the processor sockets, which is slower and is shared",
        nodes=sorted(found.processors),
        processor_nodes=sorted(own),
        memory_nodes=sorted(found.memory),
        accelerator_nodes=dict(found.accelerators),
    )


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


def memory(root: Path = Path("/")) -> Memory:
    """What Linux says in /proc and /sys below `root`."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines if len(words) == 3}
    return Memory(found["MemTotal:"], found["MemAvailable:"], limits(root))


def check_memory(found: Memory) -> Check:
    """Free memory of the machine and of the cgroup."""
    limit = found.group.memory_bytes
    total = min(found.total, limit or found.total)
    where = "of this machine" if limit is None or limit >= found.total else "that the cgroup allows"
    return judged(
        "free memory",
        "ok" if found.usable >= _FREE_SHARE * total else "warning",
        f"{in_bytes(found.usable)} of the {in_bytes(total)} {where} are free",
        "end other programs, raise the job's memory limit, or lower batch_size, Reading(buffer=...) and prefetch",
        "the kernel first drops cached pages of the data, so that rows are read from the disk again, and then "
        "kills a process",
        total_bytes=found.total,
        available_bytes=found.available,
        cgroup_limit_bytes=limit,
        usable_bytes=found.usable,
    )


def shared_memory() -> tuple[int, int]:
    """(size, free) in bytes of the file system of shared memory."""
    found = os.statvfs("/dev/shm")
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def check_shared_memory(total: int, free: int) -> Check:
    """Whether /dev/shm can hold the batches of worker processes."""
    return judged(
        "shared memory",
        "ok" if free >= _SHARED_BYTES else "warning",
        f"/dev/shm has {in_bytes(total)}, {in_bytes(free)} of them free",
        "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory at /dev/shm; "
        "otherwise mount -o remount,size=8g /dev/shm",
        "worker processes (Reading(workers=...)) pass batches through it, and SIGBUS kills them when it is full; "
        "NCCL uses it between the GPUs of a machine",
        total_bytes=total,
        free_bytes=free,
    )


def check_open_files(soft: int, hard: int) -> Check:
    """The soft and the hard limit of open files; `resource.RLIM_INFINITY` for no limit."""
    unlimited = soft == resource.RLIM_INFINITY
    enough = unlimited or soft >= _ENOUGH_FILES
    more = hard if 0 < hard < 65536 else 65536
    raised = "; the hard limit must be raised first, in /etc/security/limits.conf" if 0 < hard <= soft else ""
    return judged(
        "open files",
        "ok" if enough else "warning" if soft < _FEW_FILES else "note",
        f"this process may open {'any number of' if unlimited else f'{soft:,}'} files",
        f"ulimit -n {more} in the shell that starts the job{raised}",
        "each mapped file, socket and worker process needs one or more; data in thousands of files fails with "
        "'Too many open files'",
        soft=soft,
        hard=hard,
    )


def check_page_cache(data_bytes: int, usable_bytes: int) -> Check:
    """Whether the data fit into the memory that is not in use."""
    fits = data_bytes <= usable_bytes
    return judged(
        "page cache",
        "ok" if fits else "note",
        f"{in_bytes(data_bytes)} of data {'' if fits else 'do not '}fit into {in_bytes(usable_bytes)} of free "
        "memory",
        "store narrower dtypes, read adjacent rows together by feedline.Order(shuffle=feedline.Blocks(...)), or "
        "use a machine with more memory",
        "each epoch reads the disk again, in random order if the rows are shuffled",
        data_bytes=data_bytes,
        usable_bytes=usable_bytes,
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
    """(bytes, seconds) of reading files in sequence, past the page cache where the file system allows it.

    It stops after `most` bytes, or `seconds` seconds.
    """
    done, began = 0, time.perf_counter()
    for block in (block for file in files for block in _blocks(file)):
        done += block
        if done >= most or time.perf_counter() - began > seconds:
            break
    return done, time.perf_counter() - began


def _blocks(file: Path) -> Iterator[int]:
    with file.open("rb", buffering=0) as stream:
        # drops cached pages of this file that are not modified; no effect where none can be dropped (tmpfs)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(_BLOCK)
        while count := stream.readinto(buffer):
            yield count


def check_read_rate(count: int, seconds: float, accelerators: int) -> Check:
    """The rate of reading the data, compared with what the accelerators of this process may need."""
    name, accelerators = "disk read rate", max(1, accelerators)
    if count < 1 << 20:
        return unknown(name, f"{in_bytes(count)} are too little to measure a rate; name larger files")
    rate, needed = count / seconds, _READ_PER_ACCELERATOR * accelerators
    finding = f"{rate / 1e6:,.0f} MB/s by one thread, in {in_bytes(count)}"
    if rate < needed:
        finding += f"; ResNet-50 on {accelerators} H100 reads {needed / 1e6:,.0f} MB/s (MLPerf Storage)"
    return judged(
        name,
        "ok" if rate >= needed else "warning",
        finding,
        "copy the data to a local NVMe disk, read with more threads, or store fewer bytes for each row",
        "rows that are not in the page cache arrive at the rate of the disk, and the accelerators wait for them",
        bytes=count,
        seconds=seconds,
        bytes_per_s=rate,
        compared_with_bytes_per_s=needed,
    )


def check_preallocation(environ: Mapping[str, str]) -> Check:
    """How JAX takes GPU memory. The rules are those of JAX's page on GPU memory."""
    own = {key: environ[key] for key in _ALLOCATION if key in environ}
    severity: Severity = "warning"
    if environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        fix = "unset XLA_PYTHON_CLIENT_ALLOCATOR, except to debug a failure for lack of memory"
        why = f"each array is then allocated and freed by the driver, which is very slow ({_MEMORY_PAGE})"
    elif not _is_fraction(next((environ[key] for key in _FRACTIONS if key in environ), "0.75")):
        fix = f"set {_FRACTIONS[0]} to a number above 0 and at most {_MAX_FRACTION}; the default is 0.75"
        why = "CUDA's libraries allocate outside of this share, and fail when nothing is left"
    elif environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        severity = "note"
        fix = f"unset it unless several processes share a GPU; then rather give each a share, by {_FRACTIONS[0]}"
        why = f"memory that is allocated as needed is fragmented sooner, until programs fail ({_MEMORY_PAGE})"
    else:
        severity, fix, why = "ok", "", ""
    finding = ", ".join(f"{key}={value}" for key, value in own.items())
    default = "the defaults: JAX reserves 75 % at its first operation"
    return judged("preallocation of GPU memory", severity, finding or default, fix, why, **own)


def _is_fraction(text: str) -> bool:
    try:
        return 0 < float(text) <= _MAX_FRACTION
    except ValueError:
        return False


def check_x64(enabled: bool) -> Check:
    """Whether JAX keeps 64-bit types."""
    return judged(
        "64-bit types",
        "note" if enabled else "ok",
        "jax_enable_x64 is on: NumPy's default float64 and int64 are shipped and computed as they are"
        if enabled
        else "jax_enable_x64 is off: float64 becomes float32",
        "unset JAX_ENABLE_X64 unless the computation needs float64; give dtypes where arrays are made",
        "64-bit batches take twice the host memory and transfer, and most GPUs compute float64 much more slowly",
        jax_enable_x64=enabled,
    )


def check_versions(installed: Mapping[str, str]) -> Check:
    """Whether an installed version, by package, is known to be faulty. Each fault has its source."""
    grain = installed.get("grain")
    faulty = grain in _FAULTY_GRAIN
    return judged(
        "versions with known faults",
        "note" if faulty else "ok",
        f"grain {grain}: closing a ThreadPrefetch iterator can wait forever for a producer that is blocked"
        if faulty
        else "none of 1 known fault",
        "place the batches of a Grain dataset by feedline.Feed, which reads and closes it in threads of its own",
        "reported and open: https://github.com/google/grain/issues/1372",
        grain=grain,
    )


def _installed(*packages: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_driver(driver: str | None, installed: Mapping[str, str]) -> Check:
    """Compare the NVIDIA driver with the oldest that JAX's CUDA wheel works with.

    Args:
      driver: its version; None without a driver.
      installed: versions of installed packages; JAX's CUDA plugins are looked for.
    """
    name = "NVIDIA driver"
    cuda = next((cuda for cuda, plugin in _PLUGINS.items() if plugin in installed), None)
    if driver is None:
        return unknown(name, "no NVIDIA driver is loaded")
    if cuda is None:
        return unknown(name, f"driver {driver}; no CUDA plugin of JAX that is known is installed")
    oldest = _DRIVERS[cuda]
    fits = _numbers(driver) >= _numbers(oldest)
    return judged(
        name,
        "ok" if fits else "error",
        f"driver {driver} for CUDA {cuda}"
        if fits
        else f"driver {driver} is older than {oldest}, the oldest for CUDA {cuda}",
        "update the driver; or install jax[cuda12], or NVIDIA's packages for forward compatibility",
        f"JAX does not start on the GPU, or uses the CPU ({_INSTALLATION_PAGE})",
        driver=driver,
        cuda=cuda,
        oldest=oldest,
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of the loaded NVIDIA driver; None without one."""
    file = root / "proc/driver/nvidia/version"
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text()) if file.exists() else None
    return found[0] if found else None


def gpu_count(root: Path = Path("/")) -> int:
    """The GPUs that the NVIDIA driver lists."""
    return len(list((root / "proc/driver/nvidia/gpus").glob("*")))


def check_devices(platform: str, gpus: int, installed: Mapping[str, str], platforms: str) -> Check:
    """Whether JAX uses the accelerators of this machine.

    Args:
      platform: of JAX's default devices.
      gpus: NVIDIA GPUs that the driver lists.
      installed: versions of jaxlib and of JAX's CUDA plugins.
      platforms: JAX_PLATFORMS; empty if it is not set.
    """
    name, jaxlib = "devices that JAX uses", installed["jaxlib"]
    plugins = {plugin: installed[plugin] for plugin in _PLUGINS.values() if plugin in installed}
    measured: dict[str, Any] = {"platform": platform, "gpus": gpus, "plugins": plugins, "jaxlib": jaxlib}
    if platform != "cpu" or not gpus:
        return judged(name, "ok", f"platform {platform}, {gpus} NVIDIA GPUs", **measured)
    other = next((plugin for plugin, found in plugins.items() if found != jaxlib), None)
    if platforms:
        reason, fix = f"JAX_PLATFORMS is {platforms}", "unset JAX_PLATFORMS, or set it to cuda"
    elif not plugins:
        reason = "no CUDA plugin is installed"
        fix = 'pip install -U "jax[cuda13]", or "jax[cuda12]" for an older driver'
    elif other:
        reason = f"{other} has version {plugins[other]}, and jaxlib {jaxlib}"
        fix = f"install both in one version: pip install -U {other}=={jaxlib}"
    else:
        reason = "the plugin could not start"
        fix = "run python -c 'import jax; jax.devices()' and read its warnings"
    return judged(
        name,
        "error",
        f"JAX runs on the CPU, though the driver lists {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}: {reason}",
        fix,
        "JAX warns once and then trains on the CPU, many times more slowly",
        **measured,
    )


def constant_operand_is_right() -> bool:
    """Whether a matrix product with a constant, followed by a reduction, is right on this machine's CPU."""

    def is_right(width: int) -> bool:
        sums = jax.jit(lambda x: (x @ jnp.ones((width, width), jnp.float32)).sum(1))
        return bool(np.allclose(np.asarray(sums(np.ones((16, width), np.float32))), float(width) * width))

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return is_right(256) and is_right(1024)


def check_constant_operand(right: bool, jaxlib: str, platform: str) -> Check:
    """XLA's fault with constant operands on CPUs: an error where JAX computes on the CPU, else a note."""
    return judged(
        "constant operands on the CPU",
        "ok" if right else "error" if platform == "cpu" else "note",
        f"jaxlib {jaxlib} on this CPU: (x @ jnp.ones((256, 256))).sum(1) in jax.jit is "
        + ("right" if right else "wrong (seen: NaN)"),
        "pass weights as arguments of the compiled function, or set "
        "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=",
        "a compiled function that holds a large constant matrix returns NaN on CPU devices, and only there",
        right=right,
        jaxlib=jaxlib,
    )
