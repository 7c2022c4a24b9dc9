"""The process-local batch that lanes fill, in two steps: what this process knows, and what all of them know."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from feedline.loader.buffers import BatchBuffers
from feedline.loader.form import LocalForm
from feedline.loader.host_batch import HostBatch
from feedline.order.schedule import Cursor, Places, Remainder
from feedline.runtime.jax_settings import JaxSettings
from feedline.sources.lanes import FirstItem, Lanes
from feedline.streams.ends import Gather, Share
from feedline.streams.items import write_items
from feedline.streams.lane import Item, Lane


@dataclasses.dataclass(frozen=True)
class StreamRecipe:
    """What the batches of a stream hold.

    Attributes:
      lanes: where items come from.
      first: the first of them.
      form: what this process supplies of a batch.
      batch_size: B, rows of a global batch.
      remainder: of the last items of an epoch. "drop": the shortest lane ends it, and what others have
        left is read to be counted. "pad": the longest lane ends it, and the rows of lanes without an
        item are not valid. "wrap", for one lane: batches run over the ends of epochs.
      epochs: of one pass; None: endless.
      gather: asks the other processes; None: this one reads every lane.
      window: how many batches are agreed on at a time.
      settings: of JAX, that hold while items are read and transformed.
    """

    lanes: Lanes
    first: FirstItem
    form: LocalForm
    batch_size: int
    remainder: Remainder
    epochs: int | None
    gather: Gather | None
    window: int
    settings: JaxSettings = dataclasses.field(default_factory=JaxSettings.of_this_thread)

    @property
    def share(self) -> Share:
        """What each lane gives to a batch."""
        return Share(self.lanes.count, self.batch_size // self.lanes.count, self.remainder == "pad")

    @property
    def local_lanes(self) -> list[int]:
        """The lanes that this process reads: those that fill a row of its own."""
        return sorted({row // self.share.items for row in self.form.rows.tolist()})

    def end_of_pass(self, after: Cursor) -> int | None:
        """The epoch before which the pass of the cursor `after` ends; None: it does not."""
        return None if self.epochs is None else (after.epoch // self.epochs + 1) * self.epochs


def draft(recipe: StreamRecipe, buffers: BatchBuffers, lanes: list[Lane], after: Cursor) -> HostBatch | None:
    """The part that the next items of this process's lanes fill; None if a lane has too few and is not padded.

    It knows nothing of the lanes of other processes: neither `valid` nor how many rows are real.

    Args:
      after: where the batch ends, if batches do not run over the ends of epochs.
    """
    began = time.perf_counter()
    form, share = recipe.form, recipe.share
    parts = {lane.index: lane.take(share.items) for lane in lanes}
    if not share.pads and any(len(part) < share.items for part in parts.values()):
        return None
    filler = Item(recipe.first.item, after.epoch, 0)
    items = [_item(parts[row // share.items], row % share.items, filler) for row in form.rows.tolist()]
    of_lane = form.rows // share.items
    epochs, positions = (
        np.array([getattr(item, name) for item in items], np.int64) for name in ("epoch", "position")
    )
    places = Places(epochs, positions * share.lanes + of_lane, np.ones(len(items), bool))
    leased = buffers.lease()
    records = (item.record for item in items)
    read, bad = write_items(form, recipe.first.spec, recipe.first.item, records, places, leased)
    return HostBatch(
        leaves=leased.leaves,
        after=Cursor(lanes[0].epoch, lanes[0].position) if recipe.remainder == "wrap" else after,
        lanes={str(lane.index): lane.state() for lane in lanes},
        rows=0,
        dropped_rows=0,
        read_s=read - began,
        transform_s=time.perf_counter() - read,
        bad=bad,
    )


def whole(recipe: StreamRecipe, draft: HostBatch, offset: int, ends: dict[int, int], dropped: int) -> HostBatch:
    """The draft of the batch after `offset` items of each lane, with what is known of all lanes."""
    form, share = recipe.form, recipe.share
    real = share.real(offset, ends)
    bad = [row for row in draft.bad if row.at % share.items < real[row.at // share.items]]  # not of padding
    leaves = draft.leaves
    if form.mask is not None:
        leaves = form.with_mask(leaves, form.mask % share.items < real[form.mask // share.items], bad)
    return draft._replace(leaves=leaves, rows=int(real.sum()), dropped_rows=dropped, bad=bad)


def _item(part: list[Item], row: int, filler: Item) -> Item:
    """What stands in a row of a lane's part: where no item is left, one that is repeated."""
    return part[row % len(part)] if part else filler
