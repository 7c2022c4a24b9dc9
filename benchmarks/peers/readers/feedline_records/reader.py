"""feedline record by record: the same shuffled Grain dataset as in grain_records_best, read through a feed.

In both, Grain shuffles and reads single records; here, feedline makes batches of the records and places them.
This environment has prometheus_client, which flax and Orbax install. If Grain finds prometheus_client, it counts
every record, for 3 µs each. The environment of grain_records_best has Grain alone, so prometheus_client is hidden
here.
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
