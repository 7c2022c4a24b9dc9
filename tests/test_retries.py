"""After reads that fail and the error that they raise, batches and counts are those of a feed without errors."""

import itertools
import threading

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

LENGTHS = (23, 26)
"""Items of two lanes, or rows of one source (the first). No length is a multiple of a lane's share of a batch."""
SIZE, EPOCHS = 8, 2


class Disk:
    """Counts reads, on any thread. Reads from number `at` on fail; none fails if `at` is None."""

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
    """Take a pass; call `next` again after an error. Returns batches, counts, and how many errors and reads."""
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
