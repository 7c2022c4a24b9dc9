"""What does it cost to place a batch that is in a slab, and to take a placed one?

Refuted by: taking a ready batch of one leaf costs the training thread more than 30 µs.

    python benchmarks/claims/place.py --out place.json
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared.limit import filler
from shared.script import parser, save

from feedline._src.feed import Feed
from feedline._src.loader.staging import Staging
from feedline._src.placement.place import Placement

_LEAVES = (1, 10, 100)
_READY = 8
"""Placed batches that wait when a sample begins."""


def placing(batch_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds to place a batch of `batch_bytes` bytes, in one leaf and in many, on one device and on all.

    Returns:
      for each case {"leaves", "devices", "aligned", "place_s": the median until the arrays are ready, "samples"}.
      Misaligned memory, which the CPU backend must copy, is measured too.
    """
    devices = jax.devices()
    found = []
    for count in sorted({1, len(devices)}):
        sharding = NamedSharding(Mesh(np.array(devices[:count]), ("data",)), PartitionSpec("data"))
        for leaves in _LEAVES:
            for aligned in (True, False):
                width = max(64, batch_bytes // leaves // len(devices) // 64 * 64)
                samples = _placed(sharding, (len(devices), width), leaves, aligned, repeats)
                found.append(
                    {
                        "leaves": leaves,
                        "devices": count,
                        "aligned": aligned,
                        "place_s": statistics.median(samples),
                        "samples": samples,
                    }
                )
    return found


def _placed(
    sharding: NamedSharding, shape: tuple[int, int], leaves: int, aligned: bool, repeats: int
) -> list[float]:
    spec = [jax.ShapeDtypeStruct(shape, np.uint8, sharding=sharding)] * leaves
    placement = Placement.of(spec)
    staging = Staging([((shape[0] * shape[1] + 64,), np.dtype(np.uint8))] * leaves, 4)
    start = 0 if aligned else 1
    samples = []
    for _ in range(repeats + 5):
        slabs = [slab[start : start + shape[0] * shape[1]].reshape(shape) for slab in staging.lease()]
        for slab in slabs:
            slab[...] = 1
        began = time.perf_counter()
        batch = jax.block_until_ready(placement.place(slabs))
        samples.append(time.perf_counter() - began)
        del slabs, batch
    return samples[5:]


def taking(repeats: int) -> dict[str, Any]:
    """Seconds that `next` takes on the training thread if batches are ready: one leaf, all devices.

    Returns:
      {"devices", "take_s": the median, "samples"}.
    """
    devices = jax.devices()
    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    rows = filler(1 << 22).reshape(-1, 1 << 10)
    samples: list[float] = []
    with Feed(rows, 64 * len(devices), sharding, prefetch=_READY) as feed:
        next(feed)
        while len(samples) < repeats:
            _wait_until(lambda: feed.statistics().ready == _READY)
            for _ in range(_READY // 2):
                began = time.perf_counter()
                batch = next(feed)
                samples.append(time.perf_counter() - began)
                jax.block_until_ready(batch)
    return {"devices": len(devices), "take_s": statistics.median(samples), "samples": samples}


def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(1e-3)


def main() -> None:
    """Measure, print and save."""
    asked = parser(__doc__)
    asked.add_argument("--batch-mb", type=float, default=4, help="size of the batch that is placed, in 10^6 bytes")
    asked.add_argument("--repeats", type=int, default=200)
    options = asked.parse_args()
    taken, placed = taking(options.repeats), placing(int(options.batch_mb * 1e6), options.repeats)
    print(f"take a ready batch, 1 leaf, {taken['devices']} devices: {taken['take_s'] * 1e6:.0f} µs")
    for found in placed:
        memory = "aligned" if found["aligned"] else "misaligned"
        print(
            f"place {found['leaves']:>3} leaves on {found['devices']} devices, {memory:<10}: "
            f"{found['place_s'] * 1e6:8.0f} µs"
        )
    save("place", options, results={"taking": taken, "placing": placed})


if __name__ == "__main__":
    main()
