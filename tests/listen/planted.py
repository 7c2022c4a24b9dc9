"""Stages that take as long as a test asks for: batches with made-up times, or a feed and a loop that sleep."""

import dataclasses
import time

import jax
import numpy as np
from row_sources import Numbered

import feedline
from feedline._src.listen.accounts import BatchTimes, Window
from feedline._src.listen.verdict import Circumstances, judge
from feedline._src.options import Settings
from feedline._src.placement.place import Placement


def window(count=100, read=0.0, host=0.0, place=0.0, cpu=0.0, wait=0.0, late=0.0, loop=0.010, idle=None):
    """A window of `count` batches that all have these times, in seconds."""
    batches = [
        BatchTimes(
            read, host, 0.0, place, cpu, 0.0, 0.0, wait, loop,
            taken=i * (loop + wait), late_s=late,
        )
        for i in range(count)
    ]  # fmt: skip
    return Window(batches, None if idle is None else idle * loop)


HOW = Circumstances(window(), Settings(threads=2, workers=0, buffer=2, prefetch=2), cores=8)


def judged(window, how=HOW, *others):
    """The report on these batches."""
    return judge(dataclasses.replace(how, window=window), *others)


ROWS = 64
"""The rows of a batch."""
LOOP_S = 0.006


class Sleeping(Numbered):
    """A source whose reads sleep for `seconds` a batch. Threads that share a batch share this time."""

    picklable = False

    def __init__(self, seconds=0.0):
        super().__init__(100_000, x=np.zeros(4, np.float32))
        self.seconds = seconds

    def read(self, rows, out):
        time.sleep(self.seconds * len(rows) / ROWS)
        out["x"][...] = 1


def trained(read=0.0, host=0.0, place=0.0, loop=LOOP_S, *, steps=100, watch=lambda feed: None):
    """The report on a feed after a loop over it. Each stage sleeps for these seconds per batch."""

    def transform(batch, rows):
        time.sleep(host * len(rows.index) / ROWS)
        return batch

    whole = Placement.place

    def slow(self, leaves):
        time.sleep(place)
        return whole(self, leaves)

    Placement.place = slow
    try:
        with feedline.Feed(
            Sleeping(read), ROWS, jax.devices()[0], transform=transform if host else None,
            reading=feedline.Reading(threads=2),
        ) as feed:  # fmt: skip
            for _, batch in zip(range(steps), feed, strict=False):
                del batch  # as a training loop drops its batch
                watch(feed)
                time.sleep(loop)
            return feed.report()
    finally:
        Placement.place = whole
