"""Each process of test_four_processes.py: reads rows, resumes, and meets a bad row that only one process reads.

    feedline launch --processes 4 --cpu --devices-per-process 1 -- python four_processes.py FOLDER

Before the bad row, each process writes the rows that it saw to `FOLDER/PROCESS.json`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline

ROWS, SIZE, BEFORE, RESUMED_SIZE = 96, 8, 5, 4
SOURCE = {"y": np.arange(ROWS)}
ORDER = feedline.Order(seed=7)
DAMAGED = 50


def damage(batch, rows):
    if DAMAGED in batch["y"]:
        raise ValueError("this row is damaged")
    return batch


def part_of(batch):
    """[(offset of its first row in the batch, its rows)] of each shard on this process's devices."""
    return [(shard.index[0].start, np.asarray(shard.data).tolist()) for shard in batch["y"].addressable_shards]


def main(folder):
    feedline.cluster.initialize()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    seen = {}
    with feedline.Feed(SOURCE, SIZE, sharding, order=ORDER, epochs=1) as feed:
        seen["rows"] = [part_of(next(feed)) for _ in range(BEFORE)]
        state = feed.get_state()
        seen["rest"] = [part_of(batch) for batch in feed]
    with feedline.Feed(SOURCE, RESUMED_SIZE, sharding, order=ORDER, epochs=1) as feed:
        feed.set_state(state)
        seen["resumed"] = [part_of(batch) for batch in feed]
    Path(folder, f"{jax.process_index()}.json").write_text(json.dumps(seen))
    multihost_utils.sync_global_devices("all have written")
    with feedline.Feed(SOURCE, SIZE, sharding, order=ORDER, epochs=1, transform=damage) as feed:
        for _ in feed:
            pass


if __name__ == "__main__":
    main(sys.argv[1])
