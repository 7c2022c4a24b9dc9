"""Correct and faulty feeds for the test of `feedline audit`."""

import contextlib
import itertools
import os
import threading
import time
from typing import ClassVar

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import feedline

ROWS = {"x": np.arange(400, dtype=np.int32).reshape(100, 4), "y": np.arange(100, dtype=np.int32)}


def made(mesh, source=ROWS, batch_size=16, feed=feedline.Feed, **options):
    return feed(source, batch_size, NamedSharding(mesh, P("data")), **options)


def as_it_should_be(mesh):
    columns, rows = (NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P("data")))
    options = {"epochs": 1, "steps_per_call": 2}
    return feedline.Feed(
        ROWS, 16, {"x": columns, "y": rows}, transform=lambda batch, rows: {**batch, "y": rows.index}, **options
    )


def stream(mesh):
    rows = grain.MapDataset.range(100).map(lambda i: {"x": np.int32(i)})
    return made(mesh, rows.to_iter_dataset(grain.ReadOptions(1, 2)).filter(lambda row: row["x"] % 3 > 0))


def make_lane(lane, count):
    """Every count-th number below 100 * (lane + 2), but no multiple of 3. The 8 lanes have 16, 25, … 75 items."""
    rows = grain.MapDataset.range(lane, 100 * (lane + 2), count).map(lambda i: {"x": np.full(4, i, np.int32)})
    return rows.to_iter_dataset(grain.ReadOptions(1, 2)).filter(lambda row: row["x"][0] % 3 > 0)


def lanes(mesh):
    return made(mesh, feedline.Lanes(make_lane, 8), batch_size=64, remainder="pad")


def mixed(mesh):
    """Two sources with rows of different lengths. "books" has fewer rows, so each of them comes more often."""

    def documents(count):
        lengths = np.arange(count) % 7
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return feedline.Ragged({"tokens": (np.arange(offsets[-1]), offsets)}, pad_to=(4, 5, 6))

    sources = {"web": documents(50), "books": documents(20)}
    return made(mesh, feedline.Mixture(sources, {"web": 1, "books": 1}))


class Locked:
    """Records that cannot be pickled for worker processes."""

    def __init__(self):
        self.lock = threading.Lock()

    def __len__(self):
        return 100

    def __getitem__(self, row):
        with self.lock:
            return {"x": ROWS["x"][row], "y": ROWS["y"][row]}


def centred(mesh):
    """A transform that looks at the other rows of its batch, and a source that no worker can read."""
    return made(
        mesh, Locked(), transform=lambda batch, rows: {"x": batch["x"] - batch["x"].max(), "y": batch["y"]}
    )


def swapped(mesh):
    """Swaps the first two rows of the second batch, but only if the devices lie in order along "data"."""
    in_order = mesh.shape == {"data": 4, "model": 1} and list(mesh.devices.flat) == jax.devices()

    def swap(batch, rows):
        position = np.where(in_order & (rows.position // 2 == 8), rows.position ^ 1, rows.position)
        return {name: values[position] for name, values in ROWS.items()}

    return made(mesh, order=None, transform=swap)


def by_process(mesh):
    """Process i supplies the i-th block of each batch, whatever the sharding says."""
    shards = NamedSharding(mesh, P("data")).addressable_devices_indices_map((16,)).values()
    own = np.unique([np.arange(16)[shard] for shard in shards])
    first = jax.process_index() * len(own) if len(own) < 16 else 0

    def supply(batch, rows):
        at = rows.position // 16 * 16 + first + np.searchsorted(own, rows.position % 16)
        return {name: values[at] for name, values in ROWS.items()}

    return made(mesh, order=None, transform=supply)


class OneAhead(feedline.Feed):
    """Prefetches one batch. Its state is wrong: it already counts the batch that waits."""

    waiting = None

    def __next__(self):
        batch, self.waiting = self.waiting, None
        if batch is None:
            batch = super().__next__()
        with contextlib.suppress(StopIteration):
            self.waiting = super().__next__()
        return batch


def late_state(mesh):
    return made(mesh, feedline.Lanes(make_lane, 8), feed=OneAhead, batch_size=64, remainder="pad")


class Unsteady:
    """A row source whose values change with every read."""

    spec: ClassVar = {"x": jax.ShapeDtypeStruct((), np.int32)}
    identity: ClassVar = {"kind": "unsteady"}
    reads = itertools.count()

    def __len__(self):
        return 100

    def read(self, rows, out):
        out["x"][:] = next(self.reads)

    def close(self):
        pass


def unsteady(mesh):
    return made(mesh, Unsteady())


class Repeating(feedline.Feed):
    """`rows_of` returns every second row twice, in place of the row after it."""

    def rows_of(self, state):
        return np.repeat(super().rows_of(state)[::2], 2)


def repeating(mesh):
    return made(mesh, feed=Repeating, transform=lambda batch, rows: batch)


def raises_on_one(mesh):
    if jax.process_index() == 1:
        raise ArithmeticError("as it was told to")
    return made(mesh)


def hangs(mesh):
    """Opens a named pipe, writes to it, and hangs. The pipe stays open until this process ends."""
    pipe = os.open(os.environ["FEEDS_TO_AUDIT_PIPE"], os.O_WRONLY)
    os.write(pipe, b"here")
    time.sleep(1000)
