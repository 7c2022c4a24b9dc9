"""feedline: a folder of class folders through feedline.images.decode."""

import feedline

SETTINGS = {"buffer": 2, "prefetch": 2}


def batches(task, buffer, prefetch):
    """A feed, closed at the end."""
    source = feedline.images.decode(
        task.images, task.size, "random", flip=True, scale=task.scale, ratio=task.ratio
    )
    reading = feedline.Reading(threads=task.threads, buffer=buffer)
    with feedline.Feed(
        source, task.batch_rows, task.sharding, epochs=task.epochs, reading=reading, prefetch=prefetch
    ) as feed:
        yield from feed
