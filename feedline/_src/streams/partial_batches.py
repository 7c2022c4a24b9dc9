"""Process-local batches of a stream, made in two steps.

A *partial batch* holds what this process read of its own lanes. It is completed once all processes have reported
where their lanes end: only then are `valid` and the number of real rows known.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from feedline._src.loader.buffers import BatchBuffers
from feedline._src.loader.form import LocalForm
from feedline._src.loader.host_batch import HostBatch
from feedline._src.order.schedule import BatchPositions, Cursor, Remainder
from feedline._src.record import PartTimes, Stopwatch, this_thread
from feedline._src.runtime.annotations import annotation
from feedline._src.runtime.jax_settings import JaxSettings
from feedline._src.sources.lanes import FirstItem, Lanes
from feedline._src.streams.ends import GatherReports, Share
from feedline._src.streams.items import write_items
from feedline._src.streams.lane import Item, Lane


@dataclasses.dataclass(frozen=True)
class StreamDefinition:
    """Everything that determines the batches of a stream.

    Attributes:
      lanes: where items come from.
      first: the first item.
      form: what this process supplies of a batch.
      batch_size: B, rows of a global batch.
      remainder: of the last items of an epoch. "drop": the shortest lane ends it, and what others have
        left is read to be counted. "pad": the longest lane ends it, and the rows of lanes that have no
        more items are not valid. "wrap", for one lane: a batch may continue in the next epoch.
      epochs: of one pass; None: endless.
      gather: exchanges lane ends with the other processes; None: this process reads every lane.
      window: the number of batches for which lane ends are exchanged together.
      settings: JAX's settings while items are read and transformed.
    """

    lanes: Lanes
    first: FirstItem
    form: LocalForm
    batch_size: int
    remainder: Remainder
    epochs: int | None
    gather: GatherReports | None
    window: int
    settings: JaxSettings = dataclasses.field(default_factory=JaxSettings.of_this_thread)

    @property
    def share(self) -> Share:
        """How many items each lane gives to a batch."""
        return Share(self.lanes.count, self.batch_size // self.lanes.count, self.remainder == "pad")

    @property
    def local_lanes(self) -> list[int]:
        """The lanes that this process reads: those with a row that it supplies."""
        return sorted({row // self.share.items for row in self.form.rows.tolist()})

    def end_of_pass(self, after: Cursor) -> int | None:
        """The first epoch after the pass of the cursor `after`; None: the pass is endless."""
        return None if self.epochs is None else (after.epoch // self.epochs + 1) * self.epochs


def read_partial_batch(
    stream: StreamDefinition, buffers: BatchBuffers, lanes: list[Lane], after: Cursor
) -> HostBatch | None:
    """The partial batch of the next items of this process's lanes; None if a lane has too few and is not padded.

    Args:
      after: the cursor after the batch; with remainder "wrap" the lane says where that is.
    """
    watch = Stopwatch()
    form, share = stream.form, stream.share
    with annotation("read"):
        parts = {lane.index: lane.take(share.items) for lane in lanes}
    if not share.pads and any(len(part) < share.items for part in parts.values()):
        return None
    filler = Item(stream.first.item, after.epoch, 0)
    items = [_item(parts[row // share.items], row % share.items, filler) for row in form.rows.tolist()]
    of_lane = form.rows // share.items
    epochs = np.array([item.epoch for item in items], np.int64)
    in_lane = np.array([item.position for item in items], np.int64)
    positions = BatchPositions(epochs, in_lane * share.lanes + of_lane, np.ones(len(items), bool))
    leased = buffers.lease()
    records = (item.record for item in items)
    bad, host = write_items(form, stream.first.spec, stream.first.item, records, positions, leased)
    total_s, cpu_s = watch.total()
    read_s = total_s - host.transform_s - host.stage_s
    times = PartTimes(
        this_thread(), watch.began, read_s, host.transform_s, host.stage_s, cpu_s - host.cpu_s, host.cpu_s
    )
    return HostBatch(
        leaves=leased.leaves,
        after=Cursor(lanes[0].epoch, lanes[0].position) if stream.remainder == "wrap" else after,
        lanes={str(lane.index): lane.state() for lane in lanes},
        rows=0,
        dropped_rows=0,
        parts=[times],
        bad=bad,
    )


def completed(
    stream: StreamDefinition, partial: HostBatch, offset: int, ends: dict[int, int], dropped: int
) -> HostBatch:
    """The batch after `offset` items of each lane, made of the partial one and of the ends of all lanes."""
    form, share = stream.form, stream.share
    real = share.real(offset, ends)
    # padding repeats items, which count once
    bad = [row for row in partial.bad if row.at % share.items < real[row.at // share.items]]
    leaves = partial.leaves
    if form.mask is not None:
        leaves = form.with_mask(leaves, form.mask % share.items < real[form.mask // share.items], bad)
    return partial._replace(leaves=leaves, rows=int(real.sum()), dropped_rows=dropped, bad=bad)


def _item(part: list[Item], row: int, filler: Item) -> Item:
    """The item for a row of a lane's part. If the lane has too few, its items are repeated."""
    return part[row % len(part)] if part else filler
