"""What one delivered batch cost: stages return times, and `next` makes a `BatchRecord` of them.

All times but CPU times are seconds by `time.perf_counter`, on Linux one clock for all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class PartTimes(NamedTuple):
    """How a thread or a worker process made a part of a process-local batch.

    Attributes:
      stage_s: getting host memory, and writing into it what is cast, cut or transformed after the read.
      read_cpu_s, host_cpu_s: the thread's CPU time while it read, and in the other two stages together.
    """

    thread: str
    began: float
    read_s: float = 0.0
    transform_s: float = 0.0
    stage_s: float = 0.0
    read_cpu_s: float = 0.0
    host_cpu_s: float = 0.0

    @property
    def ended(self) -> float:
        """When the part was complete."""
        return self.began + self.read_s + self.transform_s + self.stage_s


class PlaceTimes(NamedTuple):
    """How a batch was placed."""

    thread: str
    began: float
    place_s: float  # time in the JAX calls that make the global arrays. Transfers may continue afterwards
    place_cpu_s: float  # the thread's CPU time in these calls


class BatchRecord(NamedTuple):
    """One delivery of a feed.

    Attributes:
      asked, taken: when the training loop asked for the batch, and when it got it.
      parts: how the batch was made.
      placed: how it was placed.
      step: batches delivered over all resumes, including this delivery's.
      before: epoch and position after the previous batch.
      rows: rows of the global batch, without padding.
      bad: the bad rows, as `BadRow`s, among those rows of the batch that this process supplies.
      own_rows: rows that this process supplied since the feed was built, with padding, including this batch.
    """

    asked: float
    taken: float
    parts: Sequence[PartTimes]
    placed: PlaceTimes
    step: int = 0
    before: tuple[int, int] = (0, 0)
    rows: int = 0
    bad: Sequence[Any] = ()
    own_rows: int = 0


class Counters(NamedTuple):
    """What `next` counts: fields of `Statistics`, and `own_rows`. A tuple, for speed: each batch creates one."""

    batches: int = 0
    rows: int = 0
    dropped_rows: int = 0
    bad_rows: int = 0
    placed_bytes: int = 0
    own_rows: int = 0
