"""feedline record by record: the same shuffled Grain dataset as in grain_records_best, read through a feed.

Grain's own shuffle does the same work for each record there and here; what differs is who makes
batches of the records and places them. grain_records_best has an environment with Grain alone. This one has
flax, which brings Orbax, which brings prometheus_client, and where Grain finds that, it counts every record:
3 µs each. So that both do the same work, it is hidden here.
"""

import sys

sys.modules["prometheus_client"] = None  # before Grain looks for it

import grain  # noqa: E402

import feedline  # noqa: E402


def batches(task):
    """A feed over a dataset whose element is a row."""
    dataset = grain.MapDataset.source(task.load()).seed(42).shuffle()
    reading = feedline.Reading(threads=1)
    with feedline.Feed(dataset, task.batch_rows, task.sharding, epochs=task.epochs, reading=reading) as feed:
        yield from feed
