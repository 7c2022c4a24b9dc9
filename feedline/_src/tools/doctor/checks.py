"""Checks of this machine, of a feed, and of the leaves of a batch.

`machine_findings` and `feed_findings` measure. Most other functions only judge their arguments, for easy tests.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.machine import Topology, as_list, memory, quota, topology, usable_gpus
from feedline._src.tools.cli.terminal import in_bytes
from feedline._src.tools.doctor.findings import Finding, Severity, first_three, made

_SHARED_BYTES = 1 << 30
_FREE_SHARE = 0.1
_READ_BYTES, _READ_S, _BLOCK = 512 << 20, 3.0, 8 << 20
_READ_PER_ACCELERATOR = 205e6  # bytes per second that ResNet-50 reads on one H100, in MLPerf Storage
_SMALL_BYTES, _MANY_SMALL = 64 << 10, 16
_REPLICATED_BYTES = 4096
_SAVED_BYTES, _SAVED_SHARE = 64 << 10, 0.25
_SAMPLED_BYTES = 64 << 20
_NARROW = ("uint8", "int8", "uint16", "int16")
_BATCHES = 3
_NO_DEVICE = "no device"


# --- the machine ---


def machine_findings(environ: Mapping[str, str], data: Path | None) -> Iterator[Finding]:
    """Check the host, and whether JAX uses its accelerators. `data`: a file or folder to read."""
    allowed, (platform, accelerators) = os.sched_getaffinity(0), own_devices()
    checks = {
        "threads and processors": lambda: threads_and_processors(len(allowed), quota()),
        "affinity of processors and memory": lambda: affinity(allowed, topology()),
        "free memory": lambda: free_memory(*memory()),
        "shared memory": shared_memory,
        "devices that JAX uses": lambda: devices(platform, Path("/"), environ),
    }
    if data is not None:
        files = (file for file in itertools.chain([data], data.rglob("*")) if file.is_file())
        checks["disk read rate"] = lambda: disk_read_rate(*read_rate(files), accelerators)
    yield from made(checks)


def own_devices() -> tuple[str, int]:
    """The platform of this process's devices, and the number of its accelerators; without any, 1.

    If JAX cannot start, for example without the GPUs that JAX_PLATFORMS names, the platform is the reason.
    """
    try:
        platform = jax.default_backend()
        return platform, 1 if platform == "cpu" else jax.local_device_count()
    except Exception as error:  # noqa: BLE001  reported as the finding; jax raises RuntimeError, AssertionError
        return f"{_NO_DEVICE} ({type(error).__name__}: {' '.join(str(error).split())})", 1


def threads_and_processors(allowed: int, quota: float | None) -> Finding:
    """Whether libraries count more processors than the cgroup's quota grants. A quota of None: no limit."""
    count = max(1, min(allowed, math.ceil(quota or allowed)))
    return Finding(
        "warning" if count < allowed or count == 1 else "ok",
        f"the cgroup grants {quota:g} processors, but libraries count {allowed}"
        if count < allowed
        else f"this process may use {count} processors",
        f"give the job more processors: srun --cpus-per-task, docker run --cpus; or set OMP_NUM_THREADS={count}",
        "threads that share too few processors do not overlap; once a quota is used up, all stop for up to 0.1 s",
    )


def affinity(allowed: Set[int], found: Topology) -> Finding:
    """Whether the processors of this process are on the NUMA nodes of its memory and of its GPUs."""
    own = {node for node, there in found.processors.items() if there & allowed}
    gpu_nodes = set(found.accelerators.values()) - {-1}
    severity: Severity = "ok"
    if len(found.processors) > 1 and own and not own & set(found.memory):
        severity = "warning"
    elif len(found.processors) > 1 and gpu_nodes - own:
        severity = "note" if gpu_nodes & own else "warning"
    return Finding(
        severity,
        f"processors on node {as_list(own)}, memory on {as_list(found.memory)}, GPUs on {as_list(gpu_nodes)}",
        "bind each process to the node of its GPU: srun --gpu-bind=closest, numactl --cpunodebind --membind",
        "a copy between two nodes uses the link between processor sockets, which is shared and slower than memory",
    )


def free_memory(total: int, free: int) -> Finding:
    """Whether little memory is left."""
    return Finding(
        "ok" if free >= _FREE_SHARE * total else "warning",
        f"{in_bytes(free)} of the {in_bytes(total)} that this process may use are free",
        "end other programs, raise the job's memory limit, or lower batch_size, Reading(buffer=...) and prefetch",
        "the kernel drops cached pages of the data, which are then read from disk again; later it kills a process",
    )


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Whether /dev/shm has room for the data that NCCL passes through it."""
    found = os.statvfs(folder)
    total, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    return Finding(
        "ok" if free >= _SHARED_BYTES else "warning",
        f"{folder} has {in_bytes(total)}, {in_bytes(free)} of it free",
        "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory; mount -o remount",
        "NCCL passes data through this folder; when the folder is full, SIGBUS kills a process",
    )


def read_rate(files: Iterable[Path], most: int = _READ_BYTES, seconds: float = _READ_S) -> tuple[int, float]:
    """Read files in sequence until `most` bytes are read or `seconds` have passed. Returns (bytes, seconds)."""
    done, began, buffer = 0, time.perf_counter(), bytearray(_BLOCK)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            # drops this file's cached pages, except dirty ones; no effect on tmpfs, where none can be dropped
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while count := stream.readinto(buffer):
                done += count
                if done >= most or time.perf_counter() - began > seconds:
                    return done, time.perf_counter() - began
    return done, time.perf_counter() - began


def disk_read_rate(count: int, seconds: float, accelerators: int) -> Finding:
    """Compare the rate of reading the data with what the accelerators of this process may need."""
    rate, needed = count / seconds, _READ_PER_ACCELERATOR * accelerators
    return Finding(
        "unknown" if count < 1 << 20 else "ok" if rate >= needed else "warning",
        f"{rate / 1e6:,.0f} MB/s by one thread, over {in_bytes(count)}; ResNet-50 on {accelerators} H100 reads "
        f"{needed / 1e6:,.0f} MB/s (MLPerf Storage)"
        if count >= 1 << 20
        else "less than 1 MiB was found below --data",
        "copy the data to a local NVMe disk, read with more threads, or store fewer bytes for each row",
        "rows that are not in the page cache arrive at the rate of the disk, and the accelerators wait for them",
    )


def devices(platform: str, root: Path, environ: Mapping[str, str]) -> Finding:
    """Whether JAX cannot start, or runs on the CPU although the NVIDIA driver lists GPUs."""
    gpus, platforms = len(list((root / "proc/driver/nvidia/gpus").glob("*"))), environ.get("JAX_PLATFORMS", "")
    fix = 'read the warnings of python -c "import jax; jax.devices()"; pip install -U "jax[cuda13]"'
    if gpus and not usable_gpus(root):
        fix = "this process may open none of them: docker run --gpus all, srun --gpus-per-node=..."
    elif platforms and platform == "cpu":
        fix = "unset JAX_PLATFORMS, or set it to cuda"
    return Finding(
        "error" if platform.startswith(_NO_DEVICE) or (platform == "cpu" and gpus) else "ok",
        f"JAX runs on {platform}, and the driver lists {gpus} NVIDIA GPUs; JAX_PLATFORMS={platforms}",
        fix,
        "JAX warns once and then trains on the CPU, many times more slowly; without the CPU, it fails",
    )


# --- a feed, and a batch ---


class Leaf(NamedTuple):
    """A leaf of a global batch. `fits`: narrower integer dtypes that hold all sampled values, narrowest first."""

    name: str
    shape: Sequence[int]
    dtype: str
    nbytes: int
    devices: int = 1
    replicated: bool = False
    fits: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, array: Any, before: Leaf | None = None) -> Leaf:
        """Describe a leaf; its values are sampled on one device. `before`: the same leaf of the previous batch."""
        leaf, part = cls(name, array.shape, str(array.dtype), array.nbytes), array
        if isinstance(array, jax.Array):
            sharding, part = array.sharding, array.addressable_data(0)
            leaf = leaf._replace(devices=sharding.num_devices, replicated=sharding.is_fully_replicated)
        if part.nbytes > _SAMPLED_BYTES:
            return leaf
        return leaf._replace(fits=fitting(np.asarray(part), before.fits if before else _NARROW))

    @property
    def narrower(self) -> str | None:
        """The narrowest dtype that holds all samples, else float32 for a float64 leaf, else None."""
        return next(iter(self.fits), "float32" if self.dtype == "float64" else None)

    @property
    def saved_bytes(self) -> int:
        """Bytes that the narrower dtype saves; 0 if fewer than `_SAVED_BYTES`."""
        saved = self.nbytes - math.prod(self.shape) * np.dtype(self.narrower).itemsize if self.narrower else 0
        return saved if saved >= _SAVED_BYTES else 0


def fitting(array: npt.NDArray[Any], dtypes: Sequence[str]) -> list[str]:
    """The given dtypes that are narrower than the array's and hold all its values exactly."""
    if array.dtype.kind not in "iuf" or not array.size:  # bool, complex, bfloat16: not checked
        return []
    narrower = [dtype for dtype in dtypes if np.dtype(dtype).itemsize < array.dtype.itemsize]
    with np.errstate(invalid="ignore"):  # a cast of NaN, or of a value out of range, compares unequal
        return [dtype for dtype in narrower if np.array_equal(array.astype(dtype), array)]


def feed_findings(target: str) -> Iterator[Finding]:
    """Build the feed of module:make_feed, or of a path, over all devices, and check its first batches."""
    # imported here, because an observed process imports this module, too
    from feedline._src.tools.targets import build_feed, load_make_feed, one_size

    devices, leaves = jax.devices(), dict[str, Leaf]()
    mesh = jax.sharding.Mesh(np.array(devices)[:, None], ("data", "model"))
    with build_feed(target, load_make_feed(target, len(devices)), mesh, one_size) as feed:
        for batch in itertools.islice(feed, _BATCHES):
            for path, array in jax.tree_util.tree_leaves_with_path(batch):
                name = jax.tree_util.keystr(path)
                leaves[name] = Leaf.of(name, array, leaves.get(name))
    yield from batch_findings(list(leaves.values()))


def batch_findings(leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """Check the leaves of a batch."""
    yield from made(
        {
            "sharding of the batch": lambda: sharding(leaves),
            "dtypes of the batch": lambda: dtypes(leaves),
            "number of leaves": lambda: number_of_leaves(leaves),
        }
    )


def sharding(leaves: Sequence[Leaf]) -> Finding:
    """Whether devices hold whole leaves although each could hold only a part."""
    devices = max(leaf.devices for leaf in leaves)
    whole = [leaf for leaf in leaves if leaf.replicated and leaf.devices > 1 and leaf.nbytes >= _REPLICATED_BYTES]
    surplus = sum(leaf.nbytes * (leaf.devices - 1) for leaf in whole)
    shown = first_three([f"{leaf.name} {leaf.dtype}{list(leaf.shape)}" for leaf in whole])
    found = "the batch is on one device" if devices == 1 else f"no large leaf is replicated on {devices} devices"
    if whole:
        found = f"{shown} on each of {devices} devices: {in_bytes(surplus)} more per batch than if sharded"
    return Finding(
        "unknown" if devices == 1 else "warning" if whole else "ok",
        found,
        'shard the rows: NamedSharding(mesh, PartitionSpec("data")); with pmap, in_axes=0',
        "each device receives and keeps all rows, and all devices compute the same",
    )


def dtypes(leaves: Sequence[Leaf]) -> Finding:
    """Whether the batch is shipped in wider dtypes than its values need."""
    size, wide = sum(leaf.nbytes for leaf in leaves), [leaf for leaf in leaves if leaf.saved_bytes]
    total = sum(leaf.saved_bytes for leaf in wide)
    shown = first_three([f"{leaf.name} is {leaf.dtype} and fits {leaf.narrower}" for leaf in wide])
    return Finding(
        "ok" if not wide else "warning" if total >= _SAVED_SHARE * size else "note",
        f"in {_BATCHES} batches {shown}: {in_bytes(total)} of {in_bytes(size)} a batch could be saved",
        "ship the narrower dtype and convert in the compiled step: x.astype(jnp.float32), which XLA fuses",
        "host memory, the copy on the host and the transfer grow with the size of the dtype",
    )


def number_of_leaves(leaves: Sequence[Leaf]) -> Finding:
    """Whether the batch has many small leaves."""
    small = [leaf.nbytes for leaf in leaves if leaf.nbytes < _SMALL_BYTES]
    return Finding(
        "warning" if len(small) >= _MANY_SMALL else "ok",
        f"{len(small)} of {len(leaves)} leaves are below {in_bytes(_SMALL_BYTES)}: {in_bytes(sum(small))} in all",
        "concatenate leaves of one dtype into one array on the host, and split it in the compiled step",
        "placing an array has a fixed cost: 64 arrays took 34 to 78 times as long as one of the same total size",
    )
