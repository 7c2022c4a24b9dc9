"""feedline: a folder of class folders through feedline.images.decode."""

import feedline


def batches(task):
    """A feed, closed at the end."""
    source = feedline.images.decode(
        task.images, task.size, "random", flip=True, scale=task.scale, ratio=task.ratio
    )
    reading = feedline.Reading(threads=task.threads)
    with feedline.Feed(source, task.batch_rows, task.sharding, epochs=task.epochs, reading=reading) as feed:
        yield from feed
