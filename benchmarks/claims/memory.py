"""Does a feed's memory grow?

A loop takes 100,000 batches. The resident memory of the process, as the kernel counts it, is read after a warm-up
and at the end. The loop holds two batches, like a loop that dispatches the next step before the last one is done.
It pauses once among its first steps, as for a checkpoint: then all buffers are full, which needs the largest
number of slabs. Refuted by growth of 8 MiB or more, or by a slab that is mapped after the first 20 batches.

    python benchmarks/claims/memory.py --out memory.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

import feedline

SETTLED = 20
"""Batches after which no new slab may be mapped."""
PAUSE = 10
"""The batch after which the loop pauses."""
WARM_UP = 2_000
"""Batches of the warm-up: by then allocators and caches have grown to their size."""


def resident_bytes() -> int:
    """The resident memory of this process, counted page by page: /proc/self/status lags behind."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not say how much memory is resident")


def run(batches: int, transform: bool) -> dict[str, object]:
    """Memory while a feed delivers batches of 64 KB in two leaves, one of them cast."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    source = {"x": np.zeros((50_000, 1_000), np.uint8), "y": np.zeros(50_000, np.int64)}
    keep = (lambda batch, rows: dict(batch)) if transform else None
    warm_up, every = min(WARM_UP, batches // 2), max(1, batches // 20)
    held, current = {}, None  # by batch: resident bytes and slabs
    with feedline.Feed(source, 64, sharding, transform=keep) as feed:
        for batch in range(1, batches + 1):
            _previous, current = current, None  # two batches are alive at a time
            current = jax.block_until_ready(next(feed))
            if batch == PAUSE:
                time.sleep(0.5)
            if batch in (SETTLED, warm_up, batches) or batch % every == 0:
                held[batch] = resident_bytes(), feed.statistics().slabs
    (early, slabs), (warm, _), (late, slabs_at_the_end) = (held[at] for at in (SETTLED, warm_up, batches))
    return {
        "batches": batches,
        "transform": transform,
        "growth_bytes": late - warm,
        "growth_bytes_after_20": late - early,
        "slabs_after_20": slabs,
        "slabs_at_the_end": slabs_at_the_end,
        "samples": [(batch, *of) for batch, of in held.items()],
    }


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--batches", type=int, default=100_000, help="at least 40")
    options = asked.parse_args()
    results = [run(options.batches, transform) for transform in (False, True)]
    for result in results:
        grown = f"{result['growth_bytes'] / 2**20:+.2f} MiB"
        print(
            f"{result['batches']:,} batches, transform {result['transform']}: {grown}, "
            f"slabs {result['slabs_after_20']} after 20 batches, {result['slabs_at_the_end']} at the end"
        )
    save("memory", options, results=results)


if __name__ == "__main__":
    main()
