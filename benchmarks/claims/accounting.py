"""What does it cost that a feed accounts for each batch?

The calls that account for a batch are timed alone, on one thread: `calls_us` is their processor time a batch,
`loop_us` the part of it that the training thread spends in `next`, and `clocks_us` what reading the clocks costs
besides.

As a check, two feeds are measured in turns, in a loop whose steps sleep: one as it is, and one whose accounts
are kept by an object that does nothing. Their difference is small beside the noise of a machine.

    python benchmarks/claims/accounting.py --out accounting.json

Refuted by a cost of more than 1 % of a step of 5 ms.
"""

from __future__ import annotations

import statistics
import sys
import time
import timeit
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

import feedline
from feedline._src.observe.accounting import Accounting
from feedline._src.observe.times import PartTimes, PlaceTimes, Stopwatch, this_thread

STEP_S = 0.005
ROWS = 2048
LAPS = 3
"""Laps of a stopwatch for a batch in one part: memory, reading, placing."""


class NoAccounts(Accounting):
    """Does nothing."""

    def delivered(self, *_):
        pass

    def placed(self, *_):
        return False

    def transferred(self, *_):
        pass


def feed_of(*, accounts):
    rows = {"x": np.zeros((1 << 15, 512), np.float32), "y": np.zeros(1 << 15, np.int32)}
    mesh = Mesh(np.array(jax.devices()), ("data",))
    feed = feedline.Feed(rows, ROWS, NamedSharding(mesh, P("data")))
    if not accounts:
        feed._observing.accounting = NoAccounts(0)
    return feed


def round_of(feed, steps):
    """Microseconds of processor time a step of the whole process, and of the training thread in `next`."""
    next(feed)
    spent, began = 0.0, time.process_time()
    for _ in range(steps):
        at = time.thread_time()
        batch = next(feed)
        spent += time.thread_time() - at
        time.sleep(STEP_S)
        del batch
    return [(time.process_time() - began) / steps * 1e6, spent / steps * 1e6]


def measured(rounds, steps):
    feeds = {"with": feed_of(accounts=True), "without": feed_of(accounts=False)}
    samples = {name: [] for name in feeds}
    for _ in range(rounds):
        for name, feed in feeds.items():
            samples[name].append(round_of(feed, steps))
    for feed in feeds.values():
        feed.close()
    pairs = list(zip(samples["with"], samples["without"], strict=True))
    process_us, next_us = (statistics.median(a[i] - b[i] for a, b in pairs) for i in range(2))
    watch = Stopwatch()
    clocks_us = (LAPS * timeit.timeit(watch.lap, number=10_000) + timeit.timeit(this_thread, number=10_000)) * 100
    loop_us, calls_us = calls()
    return {
        "step_us": STEP_S * 1e6,
        "loop_us": loop_us,
        "calls_us": calls_us,
        "clocks_us": clocks_us,
        "share_of_step": (calls_us + clocks_us) / (STEP_S * 1e6),
        "process_us": process_us,
        "next_us": next_us,
        "samples": samples,
    }


def calls(batches=20_000):
    """Microseconds of processor time a batch of the training thread's call, and of all calls together."""
    with feed_of(accounts=True) as feed:
        observing, part = feed._observing, PartTimes("feedline-read-0", 0.0, 1e-3, 1e-3, 1e-4, 1e-3, 1e-3)
        spent, arrays = [0.0, 0.0], jax.tree.leaves(next(feed))
        for i in range(batches):
            now = i * STEP_S
            placed = PlaceTimes("feedline-read-0", now, 1e-4, 1e-4, 1e-4)
            began = time.thread_time()
            observing.accounting.delivered(now + 1e-3, now + 2e-3, [part], placed)
            between = time.thread_time()
            observing.placed(placed, arrays)
            spent[0] += between - began
            spent[1] += time.thread_time() - began
    return [each / batches * 1e6 for each in spent]


def main():
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=15)
    asked.add_argument("--steps", type=int, default=200)
    options = asked.parse_args()
    result = measured(options.rounds, options.steps)
    print(f"calls:    {result['calls_us']:.1f} µs of processor time a batch, all threads together")
    print(f"          {result['loop_us']:.1f} µs of them on the training thread, in next")
    print(f"clocks:   {result['clocks_us']:.1f} µs")
    print(f"together  {result['share_of_step']:.2%} of a step of {STEP_S * 1e3:g} ms")
    print(f"check: two feeds differ by {result['process_us']:.0f} µs of processor time a step; in rounds by")
    differences = [a[0] - b[0] for a, b in zip(*result["samples"].values(), strict=True)]
    print(f"       {min(differences):.0f} to {max(differences):.0f} µs")
    save("accounting", options, **result)


if __name__ == "__main__":
    main()
