"""A feed that exists only as arithmetic: what a loop measures with any settings, by costs it alone knows."""

import dataclasses
import random

from feedline._src.bounds import Bounds
from feedline._src.listen.accounts import BatchTimes, Window
from feedline._src.listen.simulation import Costs, simulated_waits
from feedline._src.listen.verdict import Circumstances
from feedline._src.options import Settings

BATCHES = 128
"""Of a window."""
START = Settings(2, 0, 2, 2)
ALL = frozenset(Settings._fields)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a batch costs, in seconds of a thread.

    Attributes:
      busy: the share of that time in which the thread needs a processor.
      holds_lock: whether threads take turns while they need a processor.
      every: each so many batches take as many times as long, and the others nothing.
      at_a_time: reads that storage serves at a time.
      call_s: what each call takes beside that, however few rows it makes.
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
        running, slower = self.readers(settings)

        def about(seconds):
            return max(0.0, seconds * (1 + noise * draw.gauss(0, 1)))

        ahead = settings.prefetch + settings.buffer + 1 + 2 * settings.workers
        calls_s = self.call_s * _how(self, settings).parts
        costs = [
            Costs(about(self.make_s * self.every * slower + calls_s) if i % self.every == 0 else 0.0,
                  about(self.place_s), about(self.loop_s))
            for i in range(BATCHES + 8 * ahead)
        ]  # fmt: skip
        setting = _how(self, settings).simulated._replace(readers=running)
        return costs[-BATCHES:], simulated_waits(costs, setting)[-BATCHES:]

    def step_s(self, settings):
        """The time of a step, without noise."""
        costs, waits = self.waits(settings)
        return sum(waits) / len(waits) + sum(cost.loop_s for cost in costs) / len(costs)

    def measured(self, settings, at=0.0, noise=0.0, seed=0):
        """What a feed with these settings would look at."""
        costs, waits = self.waits(settings, noise, seed)
        _, slower = self.readers(settings)
        batches = []
        for cost, wait_s in zip(costs, waits, strict=True):
            at += cost.loop_s + wait_s
            cpu_s = cost.make_s * self.busy / slower
            batches.append(
                BatchTimes(
                    cost.make_s, 0.0, 0.0, cost.place_s, cpu_s, 0.0, 0.0, wait_s, cost.loop_s,
                    follows=True, drained=True, taken=at, late_s=None,
                )
            )  # fmt: skip
        return Window(batches, True), _how(self, settings)

    def allows(self, settings):
        """Whether settings need no more processors than there are: threads need none while they place."""
        busy = self.busy * self.make_s / (self.make_s + self.place_s)
        return settings.workers <= self.cores and (settings.threads <= 1 or settings.threads * busy <= self.cores)


def _how(load, settings):
    return Circumstances(
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
