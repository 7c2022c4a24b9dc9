"""The stages composed: batches on the mesh, from any cursor."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from feedline.agreement.replicas import ReplicaCheck
from feedline.loader.host_batch import HostBatch
from feedline.loader.local_batches import InOrder, LocalBatches
from feedline.options import Reading
from feedline.order.schedule import Cursor
from feedline.pipeline.quarantine import Quarantine
from feedline.pipeline.ways import RandomAccess, Sequential
from feedline.placement.place import Placement
from feedline.prefetch.prefetcher import HostIterator, Prefetcher
from feedline.prefetch.readers import Readers
from feedline.prefetch.synchronous import Synchronous
from feedline.prefetch.watch import Watch
from feedline.rows.row_source import RowSource


class Placed(NamedTuple):
    """A global batch on the mesh, and the host batch's account of it (without its leaves)."""

    batch: Any
    account: HostBatch
    place_s: float


T = TypeVar("T")
AnyRun = Readers[HostBatch, T] | Prefetcher[HostBatch, T] | Synchronous[HostBatch, T]
Run = AnyRun[Placed]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Everything about a feed that does not change while it runs.

    Attributes:
      way: the loader.
      placement: where batches go.
      fingerprint: of the data, for states.
      reading: with `threads` resolved.
      prefetch: placed batches that wait; 0: synchronous.
      quarantine: for bad rows.
      owned: the source, if the feed opened it and so must close it.
      check: of batches against those of other processes.
    """

    way: RandomAccess | Sequential
    placement: Placement
    fingerprint: dict[str, Any]
    reading: Reading
    prefetch: int
    quarantine: Quarantine
    owned: RowSource | None
    check: ReplicaCheck | None = None

    def start(self, after: Cursor, lanes: dict[str, Any] | None) -> Run:
        """A run over the batches after the cursor `after`, not yet started. The caller starts and closes it."""
        watch = Watch(self.reading)
        batches = self.way.open(after, lanes, self.reading, watch)
        place = functools.partial(_place, self.placement, self.check)
        return run_of(batches, place, self.reading, self.prefetch, watch)

    @property
    def slabs(self) -> int:
        """Host buffers mapped so far."""
        return self.way.buffers.staging.mapped

    def end_reads(self, timeout_s: float) -> str | None:
        """Let no further read begin, and wait for those under way. The name of a thread that is still inside."""
        return self.way.end_reads(timeout_s)

    def close(self) -> None:
        """Close the source, if it is ours, and let go of idle memory. No read may be under way."""
        self.way.buffers.staging.close()
        if self.owned is not None:
            self.owned.close()


def run_of(
    batches: LocalBatches | HostIterator[HostBatch],
    place: Callable[[HostBatch], T],
    reading: Reading,
    prefetch: int,
    watch: Watch,
) -> AnyRun[T]:
    """What reads and places batches ahead of the consumer; with `prefetch=0` on its thread. Not yet started."""
    if isinstance(batches, LocalBatches):
        if prefetch:
            threads, ahead = max(1, reading.threads or 0), reading.buffer + 1
            return Readers(batches, place, prefetch, watch, threads=threads, ahead=ahead)
        batches = InOrder(batches)
    return Prefetcher(batches, place, prefetch, watch) if prefetch else Synchronous(batches, place, watch)


def _place(placement: Placement, check: ReplicaCheck | None, host: HostBatch) -> Placed:
    if check is not None:
        check(host.leaves, host.after)
    began = time.perf_counter()
    batch = placement.place(host.leaves)
    return Placed(batch, host._replace(leaves=[]), time.perf_counter() - began)
