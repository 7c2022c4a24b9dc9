"""Bounds of the settings that a feed tunes: the user's limits, or by default the machine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from feedline._src.cluster.cores import own_cores, own_processes
from feedline._src.machine import memory
from feedline._src.options import DEFAULT_MAX_THREADS, Limits, Settings

_HOST_SHARE = 0.25
_DEVICE_SHARE = 0.1
_MIN_THREADS = 2
"""With one thread nothing would be read while a batch is placed."""


def default_threads() -> int:
    """The number of reading threads for `Reading.threads=None`."""
    return min(max(own_cores(), _MIN_THREADS), DEFAULT_MAX_THREADS)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The settings that may change, and the maximum numbers of batches in host memory and on each device.

    Attributes:
      cores: the number of processor cores that threads or workers may keep busy.
      arrays_on_host: whether the devices are CPUs, whose arrays lie in host memory.
    """

    tunable: frozenset[str]
    host_batches: int
    device_batches: int | None
    cores: int
    arrays_on_host: bool = False

    def allow(self, settings: Settings) -> bool:
        """Whether settings respect the limits of memory and of worker processes."""
        if "workers" in self.tunable and settings.workers > self.cores:
            return False
        if self.device_batches is not None and self.device_use(settings) > self.device_batches:
            return False
        return self.host_use(settings) <= self.host_batches

    def within(self, settings: Settings) -> Settings:
        """Return settings with a smaller buffer or prefetch if the limits require it and the feed tunes these."""
        for name in ("buffer", "prefetch"):
            while name in self.tunable and getattr(settings, name) > 1 and not self.allow(settings):
                settings = settings._replace(**{name: getattr(settings, name) - 1})
        return settings

    def host_use(self, settings: Settings) -> int:
        """Maximum host batches in use, including reads that began before a change of settings."""
        batches = 2 * settings.host_batches + settings.workers + settings.shared_batches
        return batches + (settings.prefetch + 2 if self.arrays_on_host else 0)

    def device_use(self, settings: Settings) -> int:
        """Maximum batches on a device: `prefetch` that wait or are being placed, `prefetch` more that threads may
        still be placing after a change of settings, and two in use.
        """
        return 2 * settings.prefetch + 2


def bounds_of(
    limits: Limits,
    tunable: frozenset[str],
    start: Settings,
    *,
    local_bytes: int,
    shard_bytes: int,
    devices: Sequence[Any],
) -> tuple[Bounds, Settings]:
    """Return the bounds of a feed, and its first settings: `start`, or smaller ones if a limit requires them."""
    on_host = all(device.platform == "cpu" for device in devices)
    bounds = Bounds(
        tunable=tunable,
        host_batches=(limits.host_bytes or _host_bytes()) // max(1, local_bytes),
        device_batches=_device_batches(limits, shard_bytes, devices, on_host=on_host),
        cores=limits.cores or own_cores(),
        arrays_on_host=on_host,
    )
    threads = start.threads
    if "threads" in tunable and limits.cores is not None:
        threads = max(1, min(threads, limits.cores))
    smallest = bounds.within(start._replace(threads=threads))
    host, device = bounds.host_use(smallest), bounds.device_use(smallest)
    if limits.host_bytes is not None and host > bounds.host_batches:
        raise ValueError(_refusal("host_bytes", limits.host_bytes, host, local_bytes, smallest))
    if limits.device_bytes is not None and device > limits.device_bytes // max(1, shard_bytes):
        raise ValueError(_refusal("device_bytes", limits.device_bytes, device, shard_bytes, smallest))
    return bounds, smallest


def _refusal(name: str, limit: int, batches: int, each: int, settings: Settings) -> str:
    return (
        f"Limits.{name} must hold {batches} batches of {each:,} bytes ({batches * each:,} bytes) for buffer "
        f"{settings.buffer} and prefetch {settings.prefetch}, got {limit:,}; raise it, or use a smaller batch_size"
    )


def _device_batches(limits: Limits, shard_bytes: int, devices: Sequence[Any], *, on_host: bool) -> int | None:
    if limits.device_bytes is not None:
        return limits.device_bytes // max(1, shard_bytes)
    if on_host:  # arrays of CPU devices lie in host memory, and are counted there
        return None
    totals = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [total for total in totals if total]
    return int(_DEVICE_SHARE * min(known)) // max(1, shard_bytes) if known else None


def _host_bytes() -> int:
    return int(_HOST_SHARE * memory()[0]) // own_processes()
