"""A feed and a loop whose stages take as long as a test asks for: each sleeps, which needs no processor."""

import itertools
import random
import time

import jax
import numpy as np

import feedline
from feedline._src.placement.place import Placement

ROWS = 64
"""Of a batch."""
LOOP_S = 0.006


class Sleeping:
    """Rows that take `seconds` a batch to read, however many threads share a batch; see `sleeper`."""

    spec = {"x": jax.ShapeDtypeStruct((4,), np.float32)}  # noqa: RUF012
    identity = {"kind": "sleeping"}  # noqa: RUF012
    picklable = False

    def __init__(self, seconds, jitter, every):
        self.sleep = sleeper(seconds, jitter, every)

    def __len__(self):
        return 100_000

    def read(self, rows, out):
        self.sleep(len(rows) / ROWS)
        out["x"][...] = 1

    def close(self):
        pass


def sleeper(seconds, jitter, every=1):
    """Sleeps for a part of `seconds`, give or take `jitter` of that; but only each `every`-th time."""
    draw, calls = random.Random(0), itertools.count()

    def sleep(part=1.0):
        if seconds and next(calls) % every == 0:
            time.sleep(seconds * part * (1 + jitter * draw.uniform(-1, 1)))

    return sleep


def trained(
    read=0.0, host=0.0, place=0.0, loop=LOOP_S, *, jitter=0.2, read_every=1, steps=100, watch=None, **options
):
    """The feed's report after a loop over it, and the share of the time outside of `next` by the loop's own clock.

    The loop sleeps, so the devices are idle in it.

    Args:
      read, host, place, loop: seconds a batch.
      read_every: so many reads, of which one takes long.
      watch: called with the feed after each step.
      options: of `Reading`, and `prefetch`.
    """
    prefetch = options.pop("prefetch", 2)
    options = {"threads": 2, **options}
    ahead = sum(2 if n == "auto" else n for n in (prefetch, options.get("buffer", 2))) + 1
    stages = {"host": sleeper(host, jitter), "place": sleeper(place, jitter), "loop": sleeper(loop, jitter)}

    def transform(batch, rows):
        stages["host"](len(rows.index) / ROWS)
        return batch

    whole = Placement.place

    def slow(self, leaves):
        stages["place"]()
        return whole(self, leaves)

    Placement.place = slow
    try:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        with feedline.Feed(
            Sleeping(read, jitter, read_every), ROWS, sharding, prefetch=prefetch,
            transform=transform if host else None, reading=feedline.Reading(**options),
        ) as feed:  # fmt: skip
            waited_s = 0.0
            for step in range(steps):
                asked = time.perf_counter()
                batch = next(feed)
                ended = time.perf_counter()
                del batch  # by the loop, as in any other one
                waited_s += ended - asked
                if step == min(ahead, steps // 2) - 1:  # what was read ahead has been taken
                    began, waited_s = ended, 0.0
                if step < steps - 1:
                    stages["loop"]()
                if watch is not None:
                    watch(feed)
            return feed.report(), 1 - waited_s / (ended - began)
    finally:
        Placement.place = whole
