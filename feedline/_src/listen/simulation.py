"""A simulation of a feed: how long its training loop would wait with other settings.

It replays the measured times of batches through the rules of the pipeline: readers make at most `ahead` batches,
and a batch is placed only once fewer than `prefetch` placed ones are waiting.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

_MIN_ROUNDS = 3
"""Replays of the measured batches; the first one fills the buffers."""


class Costs(NamedTuple):
    """What one batch costs, in seconds of a thread: to make it in host memory, to place it, to train on it."""

    make_s: float
    place_s: float
    loop_s: float


class Setting(NamedTuple):
    """How a feed works ahead."""

    readers: int  # threads or worker processes that make batches in host memory at a time
    readers_place: bool  # whether these also place the batches; else one more thread does
    parts: int  # in how many parts a batch is made
    ahead: int  # most batches that are being made or wait in host memory
    prefetch: int  # most placed batches that wait; 0: the training loop makes and places each batch itself


def simulated_wait_s(costs: Sequence[Costs], setting: Setting, cpu_s: float = 0.0) -> float:
    """The mean time that the training loop waits for a batch in the long run.

    `cpu_s`: a batch cannot be made faster than this: its processor time ÷ the processors that can work on it.

    Example:
      Two threads make in 10 ms each what the loop uses in 4 ms: a batch comes every 5 ms.

      >>> round(simulated_wait_s([Costs(0.010, 0.0, 0.004)], Setting(2, True, 1, 3, 2)), 4)
      0.001
    """
    loop_s = sum(cost.loop_s for cost in costs) / len(costs)
    if setting.prefetch == 0:
        return max(sum(cost.make_s + cost.place_s for cost in costs) / len(costs), cpu_s)
    rounds = max(_MIN_ROUNDS, math.ceil(24 * (setting.ahead + setting.prefetch) / len(costs)))
    waits = simulated_waits(list(costs) * rounds, setting)
    later = waits[len(waits) // 2 :]
    return max(sum(later) / len(later), cpu_s - loop_s)


def simulated_waits(costs: Sequence[Costs], setting: Setting) -> list[float]:
    """How long the training loop waits for each batch."""
    free = [0.0] * setting.readers  # when each reader has nothing to do
    placer = 0.0  # the same of the thread that only places
    put: list[float] = []  # ascending
    taken: list[float] = []
    waits: list[float] = []
    asked = 0.0
    for number, cost in enumerate(costs):
        allowed = put[number - setting.ahead] if number >= setting.ahead else 0.0
        made = 0.0
        for _ in range(setting.parts):
            end = max(heapq.heappop(free), allowed) + cost.make_s / setting.parts
            made = max(made, end)
            heapq.heappush(free, end)
        slot = taken[number - setting.prefetch] if number >= setting.prefetch else 0.0
        begin = max(made, slot)
        if setting.readers_place:
            if begin == made:  # else it gives up its turn, and another thread reads meanwhile
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
