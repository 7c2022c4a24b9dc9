"""A simulated feed: the times that a loop would measure with any settings, from costs that the tuner cannot see.

It replays batches through the rules of the pipeline: at most `ahead` batches are made but not placed, and a batch
is placed only once fewer than `prefetch` placed ones are waiting.
"""

import bisect
import dataclasses
import heapq
import random
from typing import NamedTuple

from feedline._src.bounds import Bounds
from feedline._src.listen.accounts import BatchTimes, Window
from feedline._src.listen.verdict import Circumstances
from feedline._src.options import Settings

BATCHES = 128
"""The number of batches in a window."""
START = Settings(2, 0, 2, 2)
ALL = frozenset(Settings._fields)


class Costs(NamedTuple):
    """What one batch costs, in seconds of a thread: to make it in host memory, to place it, to train on it."""

    make_s: float
    place_s: float
    loop_s: float


def simulated_waits(costs, how):
    """How long the training loop waits for each batch."""
    prefetch, ahead = how.settings.prefetch, how.settings.ahead(how.stream) - how.settings.prefetch
    free = [0.0] * how.readers  # when each reader is free again
    placer = 0.0  # when the thread that only places is free again
    put, taken, waits = [], [], []  # `put` is ascending
    asked = 0.0
    for number, cost in enumerate(costs):
        allowed = put[number - ahead] if number >= ahead else 0.0
        made = 0.0
        for _ in range(how.parts):
            end = max(heapq.heappop(free), allowed) + cost.make_s / how.parts
            made = max(made, end)
            heapq.heappush(free, end)
        slot = taken[number - prefetch] if number >= prefetch else 0.0
        begin = max(made, slot)
        if how.reader == "threads":
            if begin == made:  # a slot is free, so the reader places the batch at once
                free.remove(made)
                heapq.heapify(free)
                heapq.heappush(free, made + cost.place_s)
        else:
            begin = max(begin, placer)
            placer = begin + cost.place_s
        ready = begin + cost.place_s
        bisect.insort(put, ready)
        waits.append(max(0.0, ready - asked))
        taken.append(asked + waits[-1])
        asked = taken[-1] + cost.loop_s
    return waits


@dataclasses.dataclass(frozen=True)
class Load:
    """What a batch costs, in seconds of a thread.

    Attributes:
      busy: the share of `make_s` in which the thread needs a processor.
      holds_lock: whether threads take turns while they need a processor.
      every: with n, one of n batches takes n times as long to make, and the others take no time.
      at_a_time: how many reads storage serves at a time.
      call_s: what each call of `read` takes in addition, however few rows it reads.
    """

    make_s: float
    place_s: float
    loop_s: float
    busy: float = 0.0
    holds_lock: bool = False
    every: int = 1
    cores: int = 8
    at_a_time: int = 1000
    call_s: float = 0.0

    def readers(self, settings):
        """How many threads or workers make batches at a time, and how much slower each is than alone."""
        running = settings.workers or settings.threads
        processors = 1 if self.holds_lock and not settings.workers else self.cores
        slower = max(1.0, running * self.busy / processors, running / self.at_a_time)
        return running, slower

    def waits(self, settings, noise=0.0, seed=0):
        """Costs and waits of the batches of a window, after the buffers have drained."""
        draw = random.Random(seed)
        _, slower = self.readers(settings)

        def about(seconds):
            return max(0.0, seconds * (1 + noise * draw.gauss(0, 1)))

        how = _how(self, settings)
        ahead = settings.prefetch + settings.buffer + 1 + 2 * settings.workers
        calls_s = self.call_s * how.parts
        costs = [
            Costs(about(self.make_s * self.every * slower + calls_s) if i % self.every == 0 else 0.0,
                  about(self.place_s), about(self.loop_s))
            for i in range(BATCHES + 8 * ahead)
        ]  # fmt: skip
        return costs[-BATCHES:], simulated_waits(costs, how)[-BATCHES:]

    def step_s(self, settings):
        """The time of a step, without noise."""
        costs, waits = self.waits(settings)
        return sum(waits) / len(waits) + sum(cost.loop_s for cost in costs) / len(costs)

    def measured(self, settings, at=0.0, noise=0.0, seed=0):
        """What a feed with these settings would measure."""
        costs, waits = self.waits(settings, noise, seed)
        _, slower = self.readers(settings)
        batches = []
        for cost, wait_s in zip(costs, waits, strict=True):
            at += cost.loop_s + wait_s
            cpu_s = cost.make_s * self.busy / slower
            batches.append(
                BatchTimes(
                    cost.make_s, 0.0, 0.0, cost.place_s, cpu_s, 0.0, 0.0, wait_s, cost.loop_s,
                    taken=at, late_s=None,
                )
            )  # fmt: skip
        return _how(self, settings, Window(batches))

    def allows(self, settings):
        """Whether settings need no more processors than there are: threads need none while they place."""
        busy = self.busy * self.make_s / (self.make_s + self.place_s)
        return settings.workers <= self.cores and (settings.threads <= 1 or settings.threads * busy <= self.cores)


def _how(load, settings, window=None):
    return Circumstances(
        window,
        settings,
        load.cores,
        gil_wait_s=0.005 if load.holds_lock and load.busy * settings.threads > 1 else 0.0,
        may_use_workers=True,
    )


def bounds(load, tunable=ALL, host_batches=1000, device_batches=1000):
    return Bounds(tunable, host_batches, device_batches, load.cores)


def exhaustive(load, limits):
    """The shortest step of all settings within the limits."""
    tried = [
        Settings(threads, workers, buffer, prefetch)
        for threads, workers in [*((n, 0) for n in (1, 2, 3, 4, 8, 16, 32, 64)), *((0, n) for n in (1, 2, 4, 8))]
        for buffer in (2, 4, 8, 32)
        for prefetch in (2, 4, 8, 32)
    ]
    return min(load.step_s(each) for each in tried if load.allows(each) and limits.allow(each))
