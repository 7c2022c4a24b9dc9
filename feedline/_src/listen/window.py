"""The latest batches whose times say what limits a feed: those after the buffers had drained."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

from feedline._src.listen.accounting import Accounting, BatchTimes

_MIN_FREE_BATCHES = 8
"""Batches made without waiting for a slot, from which on their rate is that of the input."""
_PAUSE_FACTOR = 20
"""A pause of the loop: its own time is longer than this × the median."""
_BATCHES_PER_PAUSE = 50
"""Pauses are rare if there is at most one in this many batches."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Batches that the training loop took one after the other. All times are means of a batch, in seconds.

    Attributes:
      batches: their times, the oldest first; at least one.
      last: how many of them, at the end, were taken one after the other without a break.
      drained: whether what had been read ahead before the loop began was taken before them.
      idle_s: the part of the loop's own time in which the devices computed nothing; None: not known.
    """

    batches: Sequence[BatchTimes]
    last: int
    drained: bool
    idle_s: float | None = None

    @classmethod
    def of(cls, latest: Sequence[BatchTimes], idle_share: float | None = None) -> Window | None:
        """The batches to judge by; None if the loop has not taken two batches one after the other.

        The first batch of a pass counts, since the loop waits for it; but not that of the feed, nor the step after
        it, which compiles. A rare pause of the loop, as for an evaluation, counts as a usual step. Time in which
        the loop waited while the devices still computed counts as its own.

        Args:
          idle_share: of the loop's own time outside of `next`: in which the devices computed nothing.
        """
        drained = [batch for batch in latest if batch.drained]
        followed = [batch for batch in latest if batch.loop_s is not None]
        judged = drained or followed[1:] or followed
        if not any(batch.loop_s is not None for batch in judged):
            return None
        last = 0
        while last < len(judged) and judged[-1 - last].loop_s is not None:
            last += 1
        usual = cls(_without_pauses(judged), last, bool(drained))
        idle_s = None if idle_share is None else idle_share * usual.loop_s
        return dataclasses.replace(usual, batches=_without_computing(usual.batches), idle_s=idle_s)

    @functools.cached_property
    def loop_s(self) -> float:
        """The training loop's own time."""
        return sum(batch.loop_s or 0.0 for batch in self.batches) / len(self.batches)

    @functools.cached_property
    def wait_s(self) -> float:
        """What the training loop waits, or will wait once a full queue has drained.

        A queue that was filled before hides that batches are made more slowly than they are taken. While no batch
        had to wait for a slot, the time between two of them is that of the input.
        """
        waited = sum(batch.wait_s for batch in self.batches) / len(self.batches)
        return max(waited, self._input_period_s() - self.loop_s)

    @property
    def period_s(self) -> float:
        """Time of a step of the training loop."""
        return self.loop_s + self.wait_s

    @property
    def wait_share(self) -> float:
        """The share of the time in which the loop or its step waited for a batch, 0 to 1."""
        return min(1.0, (self.wait_s + self.late_s) / self.period_s) if self.period_s else 0.0

    @property
    def au(self) -> float:
        """The share of the time in which the devices computed, as far as that is known, 0 to 1."""
        return max(0.0, 1 - self.wait_share - (self.idle_s or 0.0) / self.period_s) if self.period_s else 1.0

    @property
    def late_s(self) -> float:
        """For how long the transfer of a batch went on after the loop had got it, as far as that is known."""
        late = [batch.late_s for batch in self.batches if batch.late_s is not None]
        return sum(late) / len(late) if late else 0.0

    @property
    def readiness(self) -> float:
        """The share of the time in which a placed batch was ready."""
        return max(0.0, 1 - self.mean("empty_s") / self.period_s) if self.period_s else 1.0

    @functools.cached_property
    def fixed_s_of_calls(self) -> tuple[float, float]:
        """Between which values the time of a call lies that does not depend on how many rows it makes."""
        from feedline._src.listen.model import fixed_s_of_calls

        return fixed_s_of_calls([(part.rows, part.made_s) for batch in self.batches for part in batch.parts])

    def mean(self, field: str) -> float:
        """The mean of a field of `BatchTimes`."""
        return float(sum(getattr(batch, field) for batch in self.batches)) / len(self.batches)

    def _input_period_s(self) -> float:
        """Time between two batches while none waited for a slot; 0 if there was no such time lately."""
        free = self.batches[len(self.batches) - self.last :]
        limited = [i for i, batch in enumerate(free) if batch.slot_s > 0.5 * self.loop_s]
        free = free[limited[-1] if limited else 0 :]
        if len(free) <= max(_MIN_FREE_BATCHES, len(self.batches) // 2):
            return 0.0
        puts = [batch.put for batch in free]
        return (max(puts) - min(puts)) / (len(puts) - 1)


def times_of(accounting: Accounting, window: Window | None) -> dict[str, Any]:
    """The fields of `Statistics` that are times, and shares of the time of a window."""
    sums, (wait_p50_s, wait_p99_s, wait_max_s) = accounting.sums()
    times: dict[str, Any] = sums._asdict()
    del times["empty_s"]  # readiness says it
    return {
        **times,
        "wait_p50_s": wait_p50_s,
        "wait_p99_s": wait_p99_s,
        "wait_max_s": wait_max_s,
        "transfer_s": accounting.transfer_s(),
        "au": window.au if window else None,
        "wait_share": window.wait_share if window else None,
        "readiness": window.readiness if window else None,
    }


def _without_pauses(batches: Sequence[BatchTimes]) -> Sequence[BatchTimes]:
    """The batches, with the usual time of the loop where it was far longer, if that is rare."""
    usual_s = statistics.median([batch.loop_s for batch in batches if batch.loop_s is not None])
    pauses = [i for i, batch in enumerate(batches) if (batch.loop_s or 0.0) > _PAUSE_FACTOR * usual_s]
    if not pauses or len(pauses) > max(1, len(batches) // _BATCHES_PER_PAUSE):
        return batches  # a loop that waits for its steps now and then is no loop that pauses
    return [batch._replace(loop_s=usual_s) if i in pauses else batch for i, batch in enumerate(batches)]


def _without_computing(batches: Sequence[BatchTimes]) -> Sequence[BatchTimes]:
    """The batches, with the time in which devices computed moved from the waits to the loop's own time."""
    looked = [(batch.computed_s, batch.wait_s) for batch in batches if batch.computed_s is not None]
    computed_s, wait_s = (sum(times) for times in zip(*looked, strict=True)) if looked else (0.0, 0.0)
    if not computed_s:
        return batches

    def moved(batch: BatchTimes) -> BatchTimes:
        own_s = batch.wait_s * computed_s / wait_s if batch.computed_s is None else batch.computed_s
        return batch._replace(wait_s=batch.wait_s - own_s, loop_s=(batch.loop_s or 0.0) + own_s)

    return [moved(batch) for batch in batches]
