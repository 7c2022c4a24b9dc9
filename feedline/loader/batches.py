"""Position → process-local batch: the element of a `grain.MapDataset`, for every source with random access."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain

from feedline.loader.buffers import BatchBuffers, Buffers
from feedline.loader.loaded import HostBatch
from feedline.loader.reads import Reads
from feedline.loader.recipe import Filled, Found, Part, Recipe
from feedline.loader.segments import ReceivedSegment, Segment
from feedline.schedule import ENDLESS, Cursor


class Element(NamedTuple):
    """What one element of `LocalBatches` gives: the batch, if it completed one and nobody took it before Grain.

    Attributes:
      batch: without its leaves if a worker made it.
      segment: the leaves, if a worker made it: a `ReceivedSegment` once it has arrived.
    """

    batch: HostBatch | None
    segment: Segment | ReceivedSegment | None = None

    def whole(self) -> HostBatch | None:
        """The batch with its leaves, in the process that is to place it."""
        if self.batch is None or not isinstance(self.segment, ReceivedSegment):
            return self.batch
        return self.batch._replace(leaves=self.segment.leaves)


_NOTHING = Element(None)


class _Draft(NamedTuple):
    """A batch of which parts are missing: where its rows are, its memory, and the parts that are done."""

    found: Sequence[Found]
    buffers: Buffers
    parts: list[Filled]


class LocalBatches(grain.MapDataset[Element]):
    """Elements k·parts to (k + 1)·parts − 1 write the parts of process-local batch k after `origin`.

    Different Grain threads write them into one set of buffers. The element that is done last has
    the batch. Elements of one batch must not be asked for twice.

    Args:
      recipe: what a batch holds.
      buffers: where it is built.
      origin: where batch 0 starts.
      parts: of a batch; fewer if it has too few rows.
      advanced: called when a part has been read, in this process.
      offer: called with k and batch k when that is complete, in this process: whether it was taken.
      reads: where each read is entered.
    """

    def __init__(
        self,
        recipe: Recipe,
        buffers: BatchBuffers,
        origin: Cursor,
        parts: int,
        advanced: Callable[[], None] | None = None,
        offer: Callable[[int, HostBatch], bool] | None = None,
        reads: Reads | None = None,
    ) -> None:
        super().__init__()
        self.parts = min(parts, *(len(plan.rows) for plan in recipe.form.plans))
        self._recipe = recipe
        self._buffers = buffers
        self._origin = origin
        self._advanced = advanced
        self._offer = offer
        self._reads = reads or Reads()
        self._count = recipe.schedule.batches_from(origin)
        self._lock = threading.Lock()
        self._drafts: dict[int, _Draft] = {}  # by k; held by _lock
        self._in_worker = False

    def __len__(self) -> int:
        return min(self._count * self.parts, ENDLESS)

    def __getitem__(self, element: Any) -> Element:  # type: ignore[override]  # Grain also slices; nobody does here
        k, part = divmod(int(element), self.parts)
        start = self._recipe.schedule.batch_at(self._origin, k)
        with self._lock:
            if k not in self._drafts:
                # under the lock: the order is a hundred NumPy calls, each of which lets go of the interpreter's
                # lock and takes it back, so two threads that look up at once take twice as long
                self._drafts[k] = _Draft(self._recipe.found(start), self._buffers.lease(), [])
            draft = self._drafts[k]
        fill = functools.partial(self._recipe.fill, draft.found, Part(part, self.parts), draft.buffers)
        filled = self._reads.run(fill)
        with self._lock:
            draft.parts.append(filled)
            complete = len(draft.parts) == self.parts
            if complete:
                del self._drafts[k]
        if self._advanced is not None:
            self._advanced()
        if not complete:
            return _NOTHING
        batch = self._recipe.batch(start, self.before(k), draft.buffers, draft.parts)
        if self._in_worker:
            return Element(batch._replace(leaves=[]), Segment(batch.leaves))
        return _NOTHING if self._offer is not None and self._offer(k, batch) else Element(batch)

    def before(self, k: int) -> Cursor:
        """The cursor that is true when batch k is the next."""
        schedule = self._recipe.schedule
        return schedule.after(schedule.batch_at(self._origin, k - 1)) if k else self._origin

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self._recipe, "buffers": self._buffers, "origin": self._origin, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
        self._in_worker = True  # nobody else pickles it
