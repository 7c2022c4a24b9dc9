"""feedline record by record: the same shuffled Grain dataset as in grain_records_best, read through a feed.

Grain's own shuffle does the same work for each record there and here; what differs is who makes
batches of the records and places them.
"""

import grain

import feedline

SETTINGS = {"threads": 1}


def batches(task, threads):
    """A feed over a dataset whose element is a row."""
    dataset = grain.MapDataset.source(task.load()).seed(42).shuffle()
    reading = feedline.Reading(threads=threads)
    with feedline.Feed(dataset, task.batch_rows, task.sharding, epochs=task.epochs, reading=reading) as feed:
        yield from feed
