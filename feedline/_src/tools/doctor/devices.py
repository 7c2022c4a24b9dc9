"""Checks of the accelerators: bandwidth from the host, the link, and whether loading and computing overlap."""

from __future__ import annotations

import functools
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline._src.feed import Feed
from feedline._src.options import Reading
from feedline._src.tools.doctor.check import Check, attempt, judged, unknown

_BATCH_BYTES, _SECONDS, _IN_FLIGHT = 64 << 20, 0.5, 2
_FAIR = 0.6
"""Below this share of what is possible, a rate is reported. Sound machines vary less."""
_OVERLAPS = 1.3
_OVERLAP_TRIES = 2
"""The better one counts: another program may disturb a measurement of a second."""
_UNCOUNTED = 6
"""First steps that are not counted, because their batches were read ahead before the measurement."""
_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one PCI Express lane, by generation."""


def device_checks() -> Iterator[Check]:
    """Measure overlap on the devices of this process, and transfers if they are accelerators."""
    yield attempt("overlap of loading and computing", lambda: check_overlap(overlaps(), jax.default_backend()))
    if jax.default_backend() == "cpu":
        reason = "no accelerator: CPU devices use the host's memory, so nothing is transferred"
        for name in ("pageable and pinned memory", "link to the devices", "all devices at once"):
            yield unknown(name, reason)
        yield unknown("transfers under compute", "no accelerator")
        return
    local = jax.local_devices()
    try:
        one = transfer_rates(local[:1])
        together = transfer_rates(local) if len(local) > 1 else one
    except (RuntimeError, ValueError) as error:
        yield unknown("host-to-device bandwidth", f"the transfer failed: {' '.join(str(error).split())}")
        return
    yield check_pageable(one)
    yield check_link(one, nvidia_links())
    yield check_all_devices(one, together, len(local))
    yield unknown(
        "transfers under compute",
        "needs a profiler's trace: python benchmarks/gpu/gpu.py --part overlap --out gpu",
    )


class Rates(NamedTuple):
    """Bytes per second from the host to devices, out of pageable and out of pinned memory."""

    pageable: float
    pinned: float


def transfer_rates(
    devices: Sequence[jax.Device], batch_bytes: int = _BATCH_BYTES, seconds: float = _SECONDS
) -> Rates:
    """Transfer batches that are sharded over the devices, two at a time, from both kinds of memory."""
    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    rows = max(1, batch_bytes // 4096 // len(devices)) * len(devices)
    pageable = np.ones((rows, 4096), np.uint8)
    pinned = jax.block_until_ready(jax.device_put(pageable, sharding.with_memory_kind("pinned_host")))
    return Rates(*(_rate(host, sharding, seconds) for host in (pageable, pinned)))


def _rate(host: np.ndarray | jax.Array, sharding: NamedSharding, seconds: float) -> float:
    jax.block_until_ready(jax.device_put(host, sharding))  # allocates
    placed: deque[jax.Array] = deque()
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < seconds:
        if len(placed) == _IN_FLIGHT:
            jax.block_until_ready(placed.popleft())
        placed.append(jax.device_put(host, sharding))
        count += 1
    jax.block_until_ready(list(placed))
    return count * host.nbytes / (time.perf_counter() - began)


class Link(NamedTuple):
    """The PCI Express link of a GPU: the generation that GPU and slot can use, and lanes in use and at most."""

    generation: int
    lanes: int
    most_lanes: int

    @property
    def bytes_per_s(self) -> float:
        """What the link can carry in one direction, without the overhead of packets."""
        return _LANE_BYTES.get(self.generation, 0.0) * self.lanes


def nvidia_links() -> list[Link]:
    """The links of the NVIDIA GPUs. Empty where nvidia-smi does not report them."""
    fields = "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return parsed_links(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout)
    except (OSError, subprocess.SubprocessError):
        return []


def parsed_links(text: str) -> list[Link]:
    """The links, from nvidia-smi's lines. The current generation is not asked: an idle link runs at the lowest.

    Example:
      >>> parsed_links("5, 16, 16")
      [Link(generation=5, lanes=16, most_lanes=16)]
    """
    lines = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [Link(*map(int, words)) for words in lines if len(words) == 3 and all(map(str.isdecimal, words))]


def check_pageable(one: Rates) -> Check:
    """Compare pageable memory with pinned memory."""
    return judged(
        "pageable and pinned memory",
        "ok" if one.pageable >= _FAIR * one.pinned else "warning",
        f"to one device {_gb(one.pageable)} out of pageable memory, {_gb(one.pinned)} out of pinned memory",
        "reuse the host buffers of batches, as feedline.Feed does, and keep threads near the GPU (see affinity)",
        "a copy out of pageable memory is first copied into pinned memory by the processor",
        pageable_bytes_per_s=one.pageable,
        pinned_bytes_per_s=one.pinned,
    )


def check_link(one: Rates, links: Sequence[Link]) -> Check:
    """Compare the rate out of pinned memory with what the link can carry."""
    name = "link to the devices"
    if not links:
        return unknown(name, "nvidia-smi does not report the links")
    link = min(links, key=lambda link: link.bytes_per_s)
    carries = f"PCI Express {link.generation} × {link.lanes} carries {_gb(link.bytes_per_s)}"
    measured = {"pinned_bytes_per_s": one.pinned, "link_bytes_per_s": link.bytes_per_s, "lanes": link.lanes}
    why = "no input pipeline can be faster than the link"
    if link.lanes < link.most_lanes:
        finding = f"a GPU uses {link.lanes} of {link.most_lanes} lanes: {carries}"
        fix = f"seat the GPU in a slot with {link.most_lanes} lanes, or look for a faulty riser"
        return judged(name, "warning", finding, fix, why, **measured)
    return judged(
        name,
        "ok" if one.pinned >= _FAIR * link.bytes_per_s else "warning",
        f"{carries}; pinned memory reaches {_gb(one.pinned)}",
        "look for other programs that use the link, another memory node (see affinity), or a slow link: "
        "nvidia-smi -q -d PERFORMANCE, lspci -vv",
        why,
        **measured,
    )


def check_all_devices(one: Rates, together: Rates, count: int) -> Check:
    """Compare the rate to all devices at once with that to one."""
    return judged(
        "all devices at once",
        "ok" if count == 1 or together.pinned >= _FAIR * count * one.pinned else "note",
        f"{_gb(together.pinned)} to {count} devices, {_gb(one.pinned)} to one, out of pinned memory",
        "ship fewer bytes: uint8 in place of float32, converted in the step",
        "devices share links, switches or memory channels: count on the rate for all, not on that for one",
        one_bytes_per_s=one.pinned,
        all_bytes_per_s=together.pinned,
        devices=count,
    )


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def overlaps() -> dict[int, float]:
    """By depth of prefetch, how much longer a step takes than the slower one of loading and computing."""
    found: dict[int, float] = {}
    for _ in range(_OVERLAP_TRIES):
        again = {depth["prefetch"]: depth["of_the_slower"] for depth in overlap(0.02, 12)["depths"]}
        found = min(filter(None, (found, again)), key=lambda each: each[2])
        if found[2] <= _OVERLAPS:
            break
    return found


def check_overlap(of_the_slower: Mapping[int, float], platform: str) -> Check:
    """Whether loading overlaps with computing at depths 1 and 2. On CPU devices both need processors."""
    zero, one, two = (of_the_slower[depth] for depth in range(3))
    return judged(
        "overlap of loading and computing",
        "ok" if two <= _OVERLAPS else "note" if platform == "cpu" else "warning",
        f"a step takes {two:.2f} × the slower one of loading and computing with prefetch=2, {one:.2f} × with 1, "
        f"{zero:.2f} × without",
        "give the process more processors, or end other programs on this machine (see threads and processors)",
        "with perfect overlap it is 1.00: what is above is waiting",
        prefetch_0=zero,
        prefetch_1=one,
        prefetch_2=two,
    )


class _SlowSource:
    """A `RowSource` of which each read waits `load_s` seconds, like a disk or a network, and uses no CPU."""

    def __init__(self, load_s: float) -> None:
        self.spec = jax.ShapeDtypeStruct((64,), np.float32)
        self.identity = {"kind": "slow"}
        self._load_s = load_s

    def __len__(self) -> int:
        return 1 << 20

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        time.sleep(self._load_s)
        out[...] = 1

    def close(self) -> None:
        """Nothing to close."""


def overlap(step_s: float, steps: int) -> dict[str, Any]:
    """Run `steps` steps at each depth, with a load that waits and a computation of `step_s` seconds each.

    With perfect overlap a step takes as long as one of them; without overlap, as long as both.

    Returns:
      {"load_s", "compute_s": as measured alone, "depths": [{"prefetch", "step_s": the median,
      "of_the_slower", "samples"}]}.
    """
    devices = len(jax.devices())
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    batch = jax.device_put(np.ones((devices, 64), np.float32), sharding)
    compute = _computation(batch, step_s)
    compute_s = statistics.median(_timed(lambda: compute(batch)) for _ in range(9))
    reading = Reading(threads=1, buffer=1)  # one thread: loads do not overlap each other
    depths = []
    for prefetch in range(4):
        with Feed(_SlowSource(step_s), devices, sharding, reading=reading, prefetch=prefetch) as feed:
            samples = [_timed(lambda: compute(next(feed))) for _ in range(steps + _UNCOUNTED)][_UNCOUNTED:]
        median = statistics.median(samples)
        ratio = median / max(step_s, compute_s)
        depths.append({"prefetch": prefetch, "step_s": median, "of_the_slower": ratio, "samples": samples})
    return {"load_s": step_s, "compute_s": compute_s, "depths": depths}


def _computation(batch: jax.Array, step_s: float) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that keeps the devices busy for about `step_s` seconds."""

    @jax.jit
    def computed(x: jax.Array, count: jax.Array) -> jax.Array:
        done: jax.Array = jax.lax.fori_loop(0, count, lambda _, y: jnp.sin(y), x)
        return done

    computed(batch, jnp.int32(1)).block_until_ready()
    count = 1000
    while (took := _timed(lambda: computed(batch, jnp.int32(count)))) < step_s / 2:  # noqa: B023
        count *= 2
    return functools.partial(computed, count=jnp.int32(count * step_s / took))


def _timed(call: Callable[[], jax.Array]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began
