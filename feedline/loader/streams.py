"""Batches of a `grain.IterDataset`: rows that can only be had one after the other, with Grain's own state.

A stream is one *lane*: every process runs it whole and keeps the rows that it owns, so that batch k
is the same on any topology. What Grain's iterator can restore, a resumed stream restores.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from feedline.errors import FeedError
from feedline.loader.buffers import BatchBuffers
from feedline.loader.form import LocalForm
from feedline.loader.items import write_items
from feedline.loader.loaded import HostBatch
from feedline.loader.records import as_arrays, digest_of, write_record
from feedline.loader.spec import RowSpec
from feedline.schedule import Cursor, Places, Remainder

LANE = "0"


class _Item(NamedTuple):
    """A record (None if no row of this process) and where in the stream it came."""

    record: Any
    epoch: int
    position: int


class Stream:
    """A dataset whose first item has been looked at, for its spec.

    The look is over when this is built: each run opens the stream anew, on its own thread, so that
    Grain's threads belong to that one and end with it. The first item is read once more for it.

    Raises:
      ValueError: the stream has no item.
    """

    def __init__(self, dataset: grain.IterDataset[Any]) -> None:
        self._dataset = dataset
        iterator: Any = iter(dataset)
        try:
            self.first = next(iterator)
        except StopIteration:
            raise ValueError("a source must have at least one row, got an IterDataset without an item") from None
        finally:
            iterator.close()
        self.spec = RowSpec.of(as_arrays(self.first))

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of the first item: all that is known of a stream before it is read."""
        return {"kind": "stream", "first": digest_of(self.first)}

    def read_first(self, out: Any) -> None:
        """Write the first item to index 0 of each leaf of `out`."""
        write_record(self.first, self.spec, jax.tree_util.tree_leaves(out), 0)

    def open(self, state: Any) -> Any:
        """An iterator of the items after `state`; None: all of them."""
        iterator: Any = iter(self._dataset)
        if state is not None:
            iterator.set_state(state)
        return iterator


class StreamBatches:
    """An iterator of the process-local batches of a stream. Called and closed by one thread at a time.

    Args:
      stream: where items come from.
      form: what this process supplies of a batch.
      buffers: where it is built.
      batch_size: items of a global batch.
      remainder: of the last items of an epoch: "drop" leaves a partial batch out, "pad" repeats its
        items, "wrap" goes on with the next epoch's.
      last_epoch: the epoch before which the pass ends; None: never.
      origin: the epoch to begin in, and how many of its items came before.
      lanes: the state saved with `origin`; None: the beginning of that epoch.
      advanced: called whenever a batch has been read.
    """

    def __init__(
        self,
        stream: Stream,
        form: LocalForm,
        buffers: BatchBuffers,
        batch_size: int,
        remainder: Remainder,
        last_epoch: int | None,
        origin: Cursor,
        lanes: dict[str, Any] | None,
        advanced: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._form = form
        self._buffers = buffers
        self._batch_size = batch_size
        self._remainder = remainder
        self._last_epoch = last_epoch
        self._cursor = origin
        self._lanes = lanes
        self._advanced = advanced
        self._iterator: Any = None
        self._dropped = 0
        # row of the global batch → row of the local one, for the rows that this process supplies
        self._local = {int(row): i for i, row in enumerate(form.rows)}

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of items that the end of the pass left out."""
        began = time.perf_counter()
        self._dropped = 0
        items: list[_Item] = []
        while len(items) < self._batch_size:
            epoch, position = self._cursor
            if epoch == self._last_epoch:
                raise StopIteration(self._dropped + len(items))
            self._take(items)
            if len(items) == self._batch_size:
                break
            if self._cursor.position == 0:
                raise FeedError(
                    f"every epoch of a stream must have items, and epoch {epoch} has none", stage="read"
                )
            if items and self._remainder == "pad":
                break
            if self._remainder == "drop":
                self._drop(items, began_epoch=position == 0)
            self._end_iterator()
            self._cursor = Cursor(epoch + 1, 0)
        return self._batch(items, began)

    def close(self) -> None:
        """End Grain's iterator."""
        self._end_iterator()

    def _take(self, items: list[_Item]) -> None:
        """Append the epoch's next items until the batch is full or the epoch is over."""
        if self._iterator is None:
            state = None if self._lanes is None else self._lanes[LANE]
            self._iterator = self._stream.open(state)
            self._lanes = None
        while len(items) < self._batch_size:
            try:
                record = next(self._iterator)
            except StopIteration:
                return
            mine = len(items) in self._local or self._remainder == "pad"
            items.append(_Item(record if mine else None, *self._cursor))
            self._cursor = Cursor(self._cursor.epoch, self._cursor.position + 1)

    def _drop(self, items: list[_Item], *, began_epoch: bool) -> None:
        if began_epoch:
            raise FeedError(
                f'remainder "drop" drops a partial batch, and epoch {self._cursor.epoch} of the stream has only '
                f'{len(items)} items for batches of {self._batch_size}; use a smaller batch, or remainder="pad"',
                stage="read",
            )
        self._dropped += len(items)
        items.clear()

    def _end_iterator(self) -> None:
        iterator, self._iterator = self._iterator, None  # let go now: at exit Grain's finalizers print tracebacks
        if iterator is not None:
            iterator.close()

    def _batch(self, items: list[_Item], began: float) -> HostBatch:
        """The process-local batch of `items`; rows beyond them repeat them and are not valid."""
        form = self._form
        mine = [items[row % len(items)] for row in form.rows.tolist()]
        buffers = self._buffers.lease()
        epochs, positions = (
            np.array([getattr(i, name) for i in mine], np.int64) for name in ("epoch", "position")
        )
        places = Places(epochs, positions, form.rows < len(items))
        records = (item.record for item in mine)
        read, bad = write_items(form, self._stream.spec, self._stream.first, records, places, buffers)
        leaves = buffers.leaves
        if form.mask is not None:
            leaves = form.with_mask(leaves, form.mask < len(items), bad)
        self._advanced()
        return HostBatch(
            leaves=leaves,
            after=self._cursor,
            lanes={LANE: copy.deepcopy(self._iterator.get_state())},
            rows=len(items),
            dropped_rows=self._dropped,
            read_s=read - began,
            transform_s=time.perf_counter() - read,
            bad=bad,
        )
