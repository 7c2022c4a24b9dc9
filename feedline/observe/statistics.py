"""What a feed has done so far, as an immutable snapshot."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A snapshot, as `Feed.statistics()` returns it. It counts what was delivered since the feed was built.

    Attributes:
      batches: global batches delivered.
      rows: rows in them that are real, over all processes; padding is not counted.
      dropped_rows: rows that the remainder left out, over all processes.
      bad_rows: rows that were bad, and replaced, of those that this process supplies. They count as rows.
      read_s, transform_s: seconds of this process's reading threads; with several threads they add
        up to more than the time that passed.
      place_s: seconds of the threads that handed batches to JAX. Transfers go on afterwards.
      wait_s: seconds the training loop waited in `next`.
      ready: placed batches that wait to be taken, now.
      threads: Grain threads that read; 0: the placement thread does.
      workers: Grain worker processes.
      slabs: host buffers mapped so far, one a leaf and batch, which are used again; in a steady run it
        stops growing.
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


class Counted(NamedTuple):
    """The part of `Statistics` that each batch adds to. A tuple: the training thread makes one for every batch."""

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
        *,
        rows: int,
        dropped_rows: int,
        bad_rows: int,
        read_s: float,
        transform_s: float,
        place_s: float,
        wait_s: float,
    ) -> Counted:
        """With one more batch."""
        return Counted(
            self.batches + 1,
            self.rows + rows,
            self.dropped_rows + dropped_rows,
            self.bad_rows + bad_rows,
            self.read_s + read_s,
            self.transform_s + transform_s,
            self.place_s + place_s,
            self.wait_s + wait_s,
        )
