"""How much device memory a compiled step takes, and how much there is."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import jax


def compiled_bytes(executable: jax.stages.Compiled, spec: Any = (), waiting: int = 0) -> dict[str, int]:
    """What the compiler says that a step needs on each device: {"arguments", "temporary", "program", "total"}.

    The total has the results that do not take the place of an argument, and so many batches that wait beside the
    one in use.

    Args:
      spec: the batches, as `feed.spec`.
      waiting: prefetched batches and the one that is being placed.
    """
    told: Any = executable.memory_analysis()
    arguments, temporary = told.argument_size_in_bytes, told.temp_size_in_bytes
    results = told.output_size_in_bytes - told.alias_size_in_bytes
    program = told.generated_code_size_in_bytes
    batch = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(spec)
    )
    total = arguments + temporary + results + program + waiting * batch
    return {"arguments": arguments, "temporary": temporary, "program": program, "total": total}


def device_limit() -> int:
    """Bytes that a device may use. On the CPU backend: its part of the host memory that is available now.

    Example:
      >>> device_limit() > 1 << 20
      True
    """
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return int(limit)
    return _available() // jax.local_device_count()


def _available() -> int:
    """Bytes of host memory that programs may still take. Where Linux does not say: those of all free pages."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def device_peak() -> int | None:
    """The most bytes that a local device ever held; None where devices do not count, as on the CPU backend."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)
