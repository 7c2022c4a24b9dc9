"""Checks of the accelerators: bandwidth from the host, the link, and whether loading and computing overlap."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline._src.tools.doctor.check import Check, unknown
from feedline._src.tools.doctor.overlap import overlap

_BATCH_BYTES, _SECONDS = 64 << 20, 0.5
_IN_FLIGHT = 2
_FAIR = 0.6
"""Below this share of what is possible, a rate is reported. Sound machines vary less."""
_OVERLAPS = 1.3
_OVERLAP_TRIES = 2
"""The better one counts: another program may disturb a measurement of a second."""
_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one PCI Express lane, by generation."""


class Rates(NamedTuple):
    """Bytes per second from the host to devices, out of pageable and out of pinned memory."""

    pageable: float
    pinned: float


class Link(NamedTuple):
    """The PCI Express link of a GPU: the generation that GPU and slot can use, and lanes in use and at most."""

    generation: int
    lanes: int
    most_lanes: int

    @property
    def bytes_per_s(self) -> float:
        """What the link can carry in one direction, without the overhead of packets."""
        return _LANE_BYTES.get(self.generation, 0.0) * self.lanes


def transfer_rates(
    devices: Sequence[jax.Device], batch_bytes: int = _BATCH_BYTES, seconds: float = _SECONDS
) -> Rates:
    """Transfers batches that are sharded over the devices, two at a time, from both kinds of memory."""
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


def nvidia_links() -> list[Link]:
    """The links of the NVIDIA GPUs. Empty where nvidia-smi does not say."""
    fields = "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parsed_links(told)


def parsed_links(told: str) -> list[Link]:
    """The links, from nvidia-smi's lines. The current generation is not asked: an idle link runs at the lowest.

    Example:
      >>> parsed_links("5, 16, 16")
      [Link(generation=5, lanes=16, most_lanes=16)]
    """
    lines = [[word.strip() for word in line.split(",")] for line in told.splitlines()]
    return [Link(*map(int, words)) for words in lines if len(words) == 3 and all(map(str.isdecimal, words))]


def check_pageable(one: Rates) -> Check:
    """Pageable memory against pinned memory."""
    name, measured = (
        "pageable and pinned memory",
        {"pageable_bytes_per_s": one.pageable, "pinned_bytes_per_s": one.pinned},
    )
    finding = f"to one device {_gb(one.pageable)} out of pageable memory, {_gb(one.pinned)} out of pinned memory"
    if one.pageable >= _FAIR * one.pinned:
        return Check(name, "ok", finding, "", "", measured)
    return Check(
        name,
        "warning",
        finding,
        "reuse the host buffers of batches, as feedline.Feed does, and keep threads near the GPU (see affinity)",
        "a copy out of pageable memory is first copied into pinned memory by the processor",
        measured,
    )


def check_link(one: Rates, links: Sequence[Link]) -> Check:
    """The rate out of pinned memory against what the link can carry."""
    name = "link to the devices"
    if not links:
        return unknown(name, "nvidia-smi does not report the links")
    slowest = min(links, key=lambda link: link.bytes_per_s)
    measured = {"pinned_bytes_per_s": one.pinned, "link_bytes_per_s": slowest.bytes_per_s, "lanes": slowest.lanes}
    told = f"PCI Express {slowest.generation} × {slowest.lanes} carries {_gb(slowest.bytes_per_s)}"
    why = "no input pipeline can be faster than the link"
    if slowest.lanes < slowest.most_lanes:
        fix = f"seat the GPU in a slot with {slowest.most_lanes} lanes, or look for a faulty riser"
        finding = f"a GPU uses {slowest.lanes} of {slowest.most_lanes} lanes: {told}"
        return Check(name, "warning", finding, fix, why, measured)
    finding = f"{told}; pinned memory reaches {_gb(one.pinned)}"
    if one.pinned >= _FAIR * slowest.bytes_per_s:
        return Check(name, "ok", finding, "", "", measured)
    fix = "look for other programs that use the link, another memory node (see affinity), or a slow link: "
    return Check(name, "warning", finding, fix + "nvidia-smi -q -d PERFORMANCE, lspci -vv", why, measured)


def check_all_devices(one: Rates, together: Rates, count: int) -> Check:
    """The rate to all devices at once against that to one."""
    name = "all devices at once"
    measured = {"one_bytes_per_s": one.pinned, "all_bytes_per_s": together.pinned, "devices": count}
    finding = f"{_gb(together.pinned)} to {count} devices, {_gb(one.pinned)} to one, out of pinned memory"
    if count == 1 or together.pinned >= _FAIR * count * one.pinned:
        return Check(name, "ok", finding, "", "", measured)
    return Check(
        name,
        "note",
        finding,
        "ship fewer bytes: uint8 in place of float32, converted in the step",
        "devices share links, switches or memory channels: count on the rate for all, not on that for one",
        measured,
    )


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
    name, one, two = "overlap of loading and computing", of_the_slower[1], of_the_slower[2]
    measured = {"prefetch_1": one, "prefetch_2": two, "prefetch_0": of_the_slower[0]}
    finding = (
        f"a step takes {two:.2f} × the slower one of loading and computing with prefetch=2, {one:.2f} × with 1, "
        f"{of_the_slower[0]:.2f} × without"
    )
    if two <= _OVERLAPS:
        return Check(name, "ok", finding, "", "", measured)
    return Check(
        name,
        "note" if platform == "cpu" else "warning",
        finding,
        "give the process more processors, or end other programs on this machine (see threads and processors)",
        "with perfect overlap it is 1.00: what is above is waiting",
        measured,
    )


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"
