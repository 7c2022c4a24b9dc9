"""How large is a lane's state, and how long does restoring it take?

    python benchmarks/claims/lanes.py

Prints the bytes of the state, and the best of nine times from `set_state` to the next batch, for several kinds of
lane after 1,024 and 16,384 items. The claim is that Grain causes this time. Refuted if restoring takes far longer
than with Grain alone, which is measured, too.
"""

from __future__ import annotations

import itertools
import json
import time

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

BATCH, TIMES = 64, 9


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


if __name__ == "__main__":
    restoring()
