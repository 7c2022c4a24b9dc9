"""How large is a lane's state, and how long does restoring it take?

python benchmarks/claims/lanes.py
feedline launch --processes 2 --cpu --devices-per-process 1 -- python benchmarks/claims/lanes.py

In one process: bytes of the state, and the time from `set_state` to the next batch, for several kinds of lane
after 1,024 and 16,384 items; the best of nine. The claim that Grain causes this time is refuted by a figure far
above that of Grain alone, which is measured too. In several processes: what a ready batch costs the training
thread, compared with a stream whose processes need not agree on ends of lanes: refuted by more than 5 µs.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

BATCH, STEPS, PAUSE_S, TIMES = 64, 1000, 0.003, 9


def numbers(lane: int, count: int) -> grain.IterDataset:
    rows = grain.MapDataset.range(lane, 10**7, count).map(lambda i: {"x": np.full(16, i % 2**31, np.int32)})
    return rows.to_iter_dataset(grain.ReadOptions(0, 0))


def packed(lane: int, count: int) -> grain.IterDataset:
    return grain.experimental.FirstFitPackIterDataset(
        numbers(lane, count), length_struct={"x": 128}, num_packing_bins=16
    ).map(lambda row: {"x": row["x"]})


KINDS = {
    "rows": numbers,
    "filter": lambda lane, count: numbers(lane, count).filter(lambda row: row["x"][0] % 2 == 0),
    "mixture": lambda lane, count: grain.IterDataset.mix([numbers(lane, count), numbers(lane, count)], [3, 1]),
    "window shuffle": lambda lane, count: grain.experimental.WindowShuffleIterDataset(
        numbers(lane, count), window_size=1000, seed=0
    ),
    "packing": packed,
}


def sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


def restoring() -> None:
    print("kind            items  bytes a lane  restore, ms  Grain alone, ms")
    for (name, make_lane), items in itertools.product(KINDS.items(), (1_024, 16_384)):
        lanes = feedline.Lanes(make_lane, 1)
        with feedline.Feed(lanes, BATCH, sharding()) as feed:
            for _ in zip(range(items // BATCH), feed, strict=False):
                pass
            state = feed.get_state()
        restored_s, grain_s = [], []
        for _ in range(TIMES):
            with feedline.Feed(lanes, BATCH, sharding(), prefetch=0) as feed:
                began = time.perf_counter()
                feed.set_state(state)
                next(feed)
                restored_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            iterator = iter(make_lane(0, 1))
            iterator.set_state(state["lanes"]["0"])
            list(itertools.islice(iterator, BATCH))
            grain_s.append(time.perf_counter() - began)
        size = len(json.dumps(state["lanes"]["0"]))
        print(f"{name:14} {items:6} {size:13} {min(restored_s) * 1e3:12.1f} {min(grain_s) * 1e3:16.1f}")


def agreeing() -> None:
    """Compare a feed of one lane, which needs no agreement, with one of a lane for each device."""
    feeds = [feedline.Feed(feedline.Lanes(numbers, count), BATCH, sharding()) for count in (1, len(jax.devices()))]
    steps: list[list[float]] = [[], []]
    for _ in range(STEPS):
        for feed, taken in zip(feeds, steps, strict=True):  # alternately, so that both see the same machine
            time.sleep(PAUSE_S)  # in place of a step: the next batch is ready after it
            began = time.thread_time()
            next(feed)
            taken.append(time.thread_time() - began)
    for feed in feeds:
        feed.close()
    one, several = (statistics.median(taken) * 1e6 for taken in steps)
    print(f"the training thread's own time for a ready batch: {one:.1f} µs of 1 lane, {several:.1f} µs of several")


if __name__ == "__main__":
    feedline.cluster.initialize()
    agreeing() if jax.process_count() > 1 else restoring()
