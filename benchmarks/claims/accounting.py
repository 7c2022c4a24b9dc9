"""What does it cost that a feed accounts for each batch?

The calls that account for a batch are timed alone, on one thread: `calls_us` is their processor time a batch,
`loop_us` the part of it that the training thread spends in `next`, and `clocks_us` what reading the clocks costs
besides. Refuted by a cost of more than 1 % of a step of 5 ms.

    python benchmarks/claims/accounting.py --out accounting.json
"""

import sys
import time
import timeit
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

import feedline
from feedline._src.observe.times import PartTimes, PlaceTimes, Stopwatch, this_thread

STEP_S = 0.005
BATCHES = 20_000
LAPS = 3
"""Laps of a stopwatch for a batch in one part: memory, reading, placing."""


def calls():
    """Microseconds of processor time a batch of the training thread's call, and of all calls together."""
    rows = {"x": np.zeros((1 << 15, 512), np.float32), "y": np.zeros(1 << 15, np.int32)}
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with feedline.Feed(rows, 2048, sharding) as feed:
        observing, part = feed._observing, PartTimes("feedline-read-0", 0.0, 1e-3, 1e-3, 1e-4, 1e-3, 1e-3)
        spent, arrays = [0.0, 0.0], jax.tree.leaves(next(feed))
        for i in range(BATCHES):
            now = i * STEP_S
            placed = PlaceTimes("feedline-read-0", now, 1e-4, 1e-4, 1e-4)
            began = time.thread_time()
            observing.accounting.delivered(now + 1e-3, now + 2e-3, [part], placed)
            between = time.thread_time()
            observing.placed(placed, arrays)
            spent[0] += between - began
            spent[1] += time.thread_time() - began
    return [each / BATCHES * 1e6 for each in spent]


def main():
    options = parser(__doc__).parse_args()
    watch = Stopwatch()
    clocks_us = (LAPS * timeit.timeit(watch.lap, number=10_000) + timeit.timeit(this_thread, number=10_000)) * 100
    loop_us, calls_us = calls()
    share = (calls_us + clocks_us) / (STEP_S * 1e6)
    print(f"calls:   {calls_us:.1f} µs of processor time a batch, {loop_us:.1f} of them in next")
    print(f"clocks:  {clocks_us:.1f} µs; together {share:.2%} of a step of {STEP_S * 1e3:g} ms")
    save("accounting", options, loop_us=loop_us, calls_us=calls_us, clocks_us=clocks_us, share_of_step=share)


if __name__ == "__main__":
    main()
