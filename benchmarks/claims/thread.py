"""What does a feed cost the training thread?

Microseconds of the training thread in `next(feed)`, and in releasing the previous batch (`del`), which frees the
interpreter's lock and must then wait for it if other threads want it. The thread sleeps between two batches, as if
it waited for accelerators. Refuted by a median above 30 µs for `next`, or above 40 µs for the release.

    python benchmarks/claims/thread.py --out thread.json
"""

import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.limit import filler
from shared.script import parser, save

import feedline

BATCH_KB, ROW_BYTES, STEP_S = (256, 1024, 4096, 16_384), 3072, 4e-3
WARM_UP = 8
"""Batches taken before a measurement, so that prefetched batches and new host buffers are not measured."""


def looped(rows, batch_kb, steps):
    """{"next_us", "release_us"}: medians of a training loop that sleeps between two batches."""
    batch_size = batch_kb * 1024 // ROW_BYTES // 8 * 8
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    times = {"next_us": [], "release_us": []}
    with feedline.Feed(rows, batch_size, sharding) as feed:
        batch = next(feed)
        for step in range(WARM_UP + steps):
            before, asked = batch, time.perf_counter()
            batch = next(feed)
            taken = time.perf_counter()
            del before  # its last reference
            released = time.perf_counter()
            if step >= WARM_UP:
                times["next_us"].append((taken - asked) * 1e6)
                times["release_us"].append((released - taken) * 1e6)
            time.sleep(STEP_S)
    return {name: statistics.median(samples) for name, samples in times.items()}


def main():
    asked = parser(__doc__)
    asked.add_argument("--gib", type=float, default=2, help="of rows in memory")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--steps", type=int, default=300)
    options = asked.parse_args()
    rows = filler(int(options.gib * 2**30) // ROW_BYTES * ROW_BYTES).reshape(-1, ROW_BYTES)
    rounds = [{kb: looped(rows, kb, options.steps) for kb in BATCH_KB} for _ in range(options.rounds)]
    found = []
    for kb in BATCH_KB:
        samples = {name: [each[kb][name] for each in rounds] for name in ("next_us", "release_us")}
        medians = {name: statistics.median(of) for name, of in samples.items()}
        found.append({"batch_kb": kb, **medians, "samples": samples})
        print(f"{kb:>6} KB: next {medians['next_us']:.0f} µs, release {medians['release_us']:.0f} µs", flush=True)
    save("thread", options, results=found)


if __name__ == "__main__":
    main()
