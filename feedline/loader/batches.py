"""Position → process-local batch: the element of a `grain.MapDataset`, for every source with random access."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from feedline import order
from feedline.errors import FeedError, RowError
from feedline.loader.buffers import BatchBuffers, Buffers
from feedline.loader.form import Indices, LocalForm
from feedline.loader.sources import RowSource
from feedline.loader.spec import Array, cast_into
from feedline.options import Order
from feedline.schedule import ENDLESS, Cursor, Places, Schedule

_STRETCH = 1 << 16
"""Positions whose rows are computed at once for batches of fewer rows: a call costs some 70 µs for any number of
positions, as much as copying a MiB, and hands the interpreter's lock over seventy times."""


class Element(NamedTuple):
    """What one element of `LocalBatches` gives: the leaves, if it completed its batch, and times."""

    leaves: list[Array]
    read_s: float
    transform_s: float


class Part(NamedTuple):
    """One of several equal parts of a batch."""

    which: int
    parts: int

    def of(self, rows: int) -> slice:
        """Which of `rows` rows belong to it."""
        return slice(rows * self.which // self.parts, rows * (self.which + 1) // self.parts)


class Found(NamedTuple):
    """Where rows of a batch stand in the run, and in the source.

    Attributes:
      places: of k rows.
      rows: int64[k], the row index of each.
    """

    places: Places
    rows: Indices

    def part(self, here: slice) -> Found:
        """Some of these rows, one after the other."""
        return self if here == slice(0, len(self.rows)) else Found(self.places.part(here), self.rows[here])


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What decides the values of this process's part of a batch. Pure but for the reads.

    Attributes:
      source: where rows are read.
      order: which row stands at which position.
      schedule: which positions batch k holds.
      form: what this process supplies of them.
    """

    source: RowSource
    order: Order
    schedule: Schedule
    form: LocalForm

    def locate(self, places: Places) -> Indices:
        """int64[k]: the row index at each place."""
        parts = [self._rows_at(epoch, places.position[here]) for epoch, here in places.runs()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _rows_at(self, epoch: int, positions: Indices) -> Indices:
        """As `order.rows_at`, of ascending positions. Near ones are looked up in stretches that batches share."""
        first, last = int(positions[0]), int(positions[-1])
        if last - first >= _STRETCH // 4:
            return order.rows_at(self.order, self.schedule.rows, epoch, positions)
        border = last // _STRETCH * _STRETCH
        rest = int(np.searchsorted(positions, border)) if first < border else 0
        rows = np.empty_like(positions)
        for here, start in ((slice(rest), border - _STRETCH), (slice(rest, None), border)):
            if here.stop != 0:
                stretch = _stretch(self.order, self.schedule.rows, epoch, start)
                np.take(stretch, positions[here] - start, out=rows[here], mode="clip")
        return rows

    def found(self, start: Cursor) -> Sequence[Found]:
        """Where the rows of the batch at `start` are: for all leaves, or for each that is read for itself."""
        wanted = [plan.rows for plan in self.form.plans] if self.form.by_leaf else [self.form.rows]
        places = [self.schedule.places(start, rows) for rows in wanted]
        return [Found(here, self.locate(here)) for here in places]

    def fill(self, found: Sequence[Found], part: Part, buffers: Buffers) -> tuple[float, float]:
        """Write a part of the batch that was `found` into its `buffers`: seconds of reading, and of the rest."""
        if self.form.by_leaf:
            return self._fill_by_leaf(found, part, buffers)
        started = time.perf_counter()
        here = part.of(len(self.form.rows))
        places, index = found[0].part(here)
        read = [leaf[here] for leaf in buffers.read]
        try:
            self._read(places, index, self.form.spec.tree(read))
            done = time.perf_counter()
            self.form.finish(read, buffers.leaves, here, places, index)
        except RowError as error:
            for i in np.flatnonzero(index == error.row)[:1]:
                error.add_note(
                    f"feedline: that row stands at epoch {places.epoch[i]}, position {places.position[i]}"
                )
            raise
        return done - started, time.perf_counter() - done

    def _read(self, places: Places, index: Indices, out: Any) -> None:
        asked = index
        if getattr(self.source, "per_epoch", False):
            if (int(places.epoch.max()) + 1) * self.schedule.rows > 1 << 63:
                raise ValueError(
                    f"a dataset is asked for element epoch × {self.schedule.rows} + row, to be below 2^63; "
                    f"epoch {places.epoch.max()} is too late for that, seek to an earlier one"
                )
            asked = places.epoch * self.schedule.rows + index
        try:
            self.source.read(asked, out)
        except FeedError:
            raise
        except Exception as error:  # of any type: a StopIteration must not pass for the end of the feed
            raise RowError(
                f"{type(self.source).__name__} failed to read {len(index)} rows, the first of them {index[0]}, "
                f"with {type(error).__name__}: {error}",
                stage="read",
            ) from error

    def _fill_by_leaf(self, found: Sequence[Found], part: Part, buffers: Buffers) -> tuple[float, float]:
        """Each leaf reads only its own rows and columns."""
        started = time.perf_counter()
        for i, (leaf, plan) in enumerate(zip(self.form.spec.leaves, self.form.plans, strict=True)):
            here = part.of(len(plan.rows))
            index = found[i].rows[here]
            read, placed = buffers.read[i], buffers.leaves[i]
            self.source.read_leaf(i, index, plan.columns, read[here])  # type: ignore[attr-defined]
            if placed is not read:
                cast_into(placed[here], read[here], leaf, index)
        return time.perf_counter() - started, 0.0

    def masked(self, leaves: list[Array], start: Cursor) -> list[Array]:
        """The leaves of the batch at `start`, with `valid` where the form has it."""
        if self.form.mask is None:
            return leaves
        return self.form.with_mask(leaves, self.schedule.places(start, self.form.mask).valid)


@functools.lru_cache(maxsize=8)
def _stretch(how: Order, rows: int, epoch: int, start: int) -> Indices:
    """The rows at `_STRETCH` positions of an epoch: half a MiB. The last stretch has fewer."""
    return order.rows_at(how, rows, epoch, np.arange(start, min(start + _STRETCH, rows)))


class LocalBatches(grain.MapDataset[Element]):
    """Elements k·parts to (k + 1)·parts − 1 write the parts of process-local batch k after `origin`.

    Different Grain threads write them into one set of buffers. The element that is done last carries
    the leaves; the others carry none. Elements of one batch must not be asked for twice.
    """

    def __init__(
        self,
        recipe: Recipe,
        buffers: BatchBuffers,
        origin: Cursor,
        parts: int,
        advanced: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.parts = min(parts, *(len(plan.rows) for plan in recipe.form.plans))
        self._recipe = recipe
        self._buffers = buffers
        self._origin = origin
        self._advanced = advanced
        self._count = recipe.schedule.batches_from(origin)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Sequence[Found], Buffers, int]] = {}
        """Batches of which parts are missing: their rows, their buffers, how many parts are. Held by _lock."""

    def __len__(self) -> int:
        return min(self._count * self.parts, ENDLESS)

    def __getitem__(self, element: Any) -> Element:  # type: ignore[override]  # Grain also slices; nobody does here
        k, part = divmod(int(element), self.parts)
        start = self._recipe.schedule.batch_at(self._origin, k)
        with self._lock:
            if k not in self._open:
                # under the lock: the order is a hundred NumPy calls, each of which lets go of the interpreter's
                # lock and takes it back, so two threads that look up at once take twice as long
                self._open[k] = self._recipe.found(start), self._buffers.lease(), self.parts
            found, buffers, _ = self._open[k]
        read_s, transform_s = self._recipe.fill(found, Part(part, self.parts), buffers)
        with self._lock:
            missing = self._open.pop(k)[2] - 1
            if missing:
                self._open[k] = found, buffers, missing
        if self._advanced is not None:
            self._advanced()
        leaves = [] if missing else self._recipe.masked(buffers.leaves, start)
        return Element(leaves, read_s, transform_s)

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self._recipe, "buffers": self._buffers, "origin": self._origin, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
