"""Reads that fail until an error is raised: afterwards batches and counts are those of a feed without errors."""

import itertools
import threading

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

LENGTHS = (23, 26)
"""Items of two lanes, or rows of one source: neither divides by a batch, nor by a lane's part of one."""
SIZE, EPOCHS = 8, 2


class Disk:
    """Counts reads, perhaps on threads of Grain's. From read `at` on they fail, until that is None."""

    def __init__(self):
        self.lock, self.reads, self.at = threading.Lock(), 0, None

    def __call__(self, value):
        with self.lock:
            self.reads += 1
            if self.at is not None and self.reads >= self.at:
                raise OSError("the disk is gone for a moment")
        return {"x": np.int32(value)}


class Rows:
    def __init__(self, read):
        self.read = read

    def __len__(self):
        return LENGTHS[0]

    def __getitem__(self, i):
        return self.read(i)


def stream(read, lane=0, count=1):
    dataset = grain.MapDataset.range(LENGTHS[lane]).map(lambda i: read(1000 * lane + i))
    return dataset.to_iter_dataset(grain.ReadOptions(0, 0))


SOURCES = {
    "records": Rows,
    "stream": stream,
    "lanes": lambda read: feedline.Lanes(lambda lane, count: stream(read, lane, count), 2),
}


def a_pass(source, remainder, prefetch, at):
    """The batches of a pass, asked for again after an error, what was counted, and how many errors and reads."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))
    read = Disk()
    options = {"epochs": EPOCHS, "remainder": remainder, "prefetch": prefetch}
    reading = feedline.Reading(threads=1, buffer=1)
    with feedline.Feed(SOURCES[source](read), SIZE, sharding, reading=reading, **options) as feed:
        read.reads, read.at = 0, at
        batches, errors = [], 0
        while True:
            try:
                batches.append(np.asarray(next(feed)["x"]).tolist())
            except feedline.FeedError:
                read.at = None
                errors += 1
            except StopIteration:
                break
        counted = feed.statistics()
    return batches, (counted.batches, counted.rows, counted.dropped_rows), errors, read.reads


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("source", "remainder"),
    [("records", "drop"), ("records", "wrap"), ("stream", "drop"), ("stream", "wrap"), ("lanes", "drop")],
)
def test_nothing_is_counted_twice_or_left_out(source, remainder, prefetch):
    batches, counted, errors, reads = a_pass(source, remainder, prefetch, at=None)
    rows = EPOCHS * (sum(LENGTHS) if source == "lanes" else LENGTHS[0])
    assert (errors, counted[1] + counted[2]) == (0, rows)
    assert counted[2] > 0
    for at in itertools.count(1):
        again = a_pass(source, remainder, prefetch, at)
        assert again[:2] == (batches, counted), f"read {at} failed"
        assert again[2] == (at <= reads)
        if at > reads:
            return
