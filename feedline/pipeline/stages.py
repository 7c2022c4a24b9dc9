"""The stages of a feed composed: a pipeline of placed batches, from any cursor on."""

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
from feedline.pipeline.access import Access
from feedline.pipeline.quarantine import Quarantine
from feedline.placement.place import Placement
from feedline.prefetch.prefetcher import HostIterator, Prefetcher
from feedline.prefetch.readers import Readers
from feedline.prefetch.synchronous import Synchronous
from feedline.prefetch.watch import Watch
from feedline.rows.row_source import RowSource


class Placed(NamedTuple):
    """A global batch on the mesh.

    Attributes:
      batch: its tree of arrays.
      metadata: the host batch without its leaves.
      place_s: seconds that placing took.
    """

    batch: Any
    metadata: HostBatch
    place_s: float


T = TypeVar("T")
AnyPipeline = Readers[HostBatch, T] | Prefetcher[HostBatch, T] | Synchronous[HostBatch, T]
Pipeline = AnyPipeline[Placed]


@dataclasses.dataclass(frozen=True)
class Stages:
    """Everything about a feed that does not change while it runs.

    Attributes:
      access: how rows are reached.
      placement: where batches go.
      fingerprint: of the data, for states.
      reading: with `threads` resolved.
      prefetch: placed batches that wait; 0: synchronous.
      quarantine: for bad rows.
      owned: the source, if the feed opened it and so must close it.
      check: of batches against those of other processes.
    """

    access: Access
    placement: Placement
    fingerprint: dict[str, Any]
    reading: Reading
    prefetch: int
    quarantine: Quarantine
    owned: RowSource | None
    check: ReplicaCheck | None = None

    def start(self, after: Cursor, lanes: dict[str, Any] | None) -> Pipeline:
        """A pipeline of the batches after the cursor `after`. The caller starts and closes it."""
        watch = Watch(self.reading)
        batches = self.access.open(after, lanes, self.reading, watch)
        place = functools.partial(_place, self.placement, self.check)
        return pipeline_of(batches, place, self.reading, self.prefetch, watch)

    @property
    def slabs(self) -> int:
        """Host buffers mapped so far."""
        return self.access.buffers.staging.mapped

    def close(self) -> None:
        """Close the source, if it is ours, and let go of idle memory. All pipelines have ended."""
        self.access.buffers.staging.close()
        if self.owned is not None:
            self.owned.close()


def pipeline_of(
    batches: LocalBatches | HostIterator[HostBatch],
    place: Callable[[HostBatch], T],
    reading: Reading,
    prefetch: int,
    watch: Watch,
) -> AnyPipeline[T]:
    """A pipeline that is to read and place batches ahead of the consumer, or with `prefetch=0` on its thread."""
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
