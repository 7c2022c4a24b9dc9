"""`Statistics`: an immutable snapshot of a feed's counts and times."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A snapshot, as `Feed.statistics()` returns it. It counts what was delivered since the feed was built.

    Attributes:
      batches: global batches delivered.
      rows: rows in these batches, over all processes, without padding.
      dropped_rows: rows that the remainder left out, over all processes.
      bad_rows: rows of this process that were bad and were replaced. They are counted in `rows`, too.
      read_s, transform_s: seconds of this process's reading threads; with several threads they add
        up to more than the time that passed.
      place_s: seconds that threads spent in the JAX calls that place batches. Transfers continue afterwards.
      wait_s: seconds the training loop waited in `next`.
      ready: placed batches that wait to be delivered now.
      threads: threads that read rows with random access at a time; 0: workers, a stream or the caller read.
      workers: Grain worker processes.
      slabs: host buffers allocated so far, one for each leaf of a batch. They are used again, so the number
        soon stops growing.
    """

    batches: int = 0
    rows: int = 0
    dropped_rows: int = 0
    bad_rows: int = 0
    read_s: float = 0.0
    transform_s: float = 0.0
    place_s: float = 0.0
    wait_s: float = 0.0
    ready: int = 0
    threads: int = 0
    workers: int = 0
    slabs: int = 0

    def __str__(self) -> str:
        """Counts, mean times of a batch, and the threads, workers and slabs in use, as text.

        Example:
          >>> print(Statistics(batches=120, rows=7_680, wait_s=0.06, read_s=0.24, threads=2, slabs=6))
          120 batches, 7,680 rows, 0 dropped, 0 bad
          per batch: waited 500 µs, read 2 ms, transform 0 s, place 0 s
          now: 0 batches ready, 2 threads, 0 workers, 6 slabs
        """
        times = {"waited": self.wait_s, "read": self.read_s, "transform": self.transform_s, "place": self.place_s}
        each = ", ".join(f"{name} {_with_unit(seconds / max(1, self.batches))}" for name, seconds in times.items())
        return (
            f"{self.batches:,} batches, {self.rows:,} rows, {self.dropped_rows:,} dropped, {self.bad_rows:,} bad\n"
            f"per batch: {each}\n"
            f"now: {self.ready} batches ready, {self.threads} threads, {self.workers} workers, {self.slabs} slabs"
        )


def _with_unit(seconds: float) -> str:
    """Example: 500 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s"


class Counters(NamedTuple):
    """The fields of `Statistics` that each batch adds to. A tuple, because it is created for every batch."""

    batches: int = 0
    rows: int = 0
    dropped_rows: int = 0
    bad_rows: int = 0
    read_s: float = 0.0
    transform_s: float = 0.0
    place_s: float = 0.0
    wait_s: float = 0.0

    def plus(
        self,
        batches: int,
        rows: int,
        dropped_rows: int,
        bad_rows: int,
        read_s: float,
        transform_s: float,
        place_s: float,
        wait_s: float,
    ) -> Counters:
        """These counters after one more delivery."""
        return Counters(
            self[0] + batches,
            self[1] + rows,
            self[2] + dropped_rows,
            self[3] + bad_rows,
            self[4] + read_s,
            self[5] + transform_s,
            self[6] + place_s,
            self[7] + wait_s,
        )
