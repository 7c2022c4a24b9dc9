"""Position → process-local batch: the element of a `grain.MapDataset`, for every source with random access."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import numpy as np

from feedline import order
from feedline.errors import FeedError, RowError
from feedline.loader.form import Indices, LocalForm
from feedline.loader.sources import RowSource
from feedline.loader.spec import Array, aligned_empty, cast_into
from feedline.options import Order
from feedline.schedule import ENDLESS, Cursor, Places, Schedule


class Element(NamedTuple):
    """What one element of `LocalBatches` gives: the leaves, if it completed its batch, and times."""

    leaves: list[Array]
    read_s: float
    transform_s: float


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

    @property
    def reads_by_leaf(self) -> bool:
        """Whether leaves need different rows or cut columns, and the source can read just those."""
        return self.form.is_cut and self.form.transform is None and hasattr(self.source, "read_leaf")

    def locate(self, places: Places) -> Indices:
        """int64[k]: the row index at each place."""
        rows = np.empty_like(places.position)
        for epoch in np.unique(places.epoch):
            here = places.epoch == epoch
            rows[here] = order.rows_at(self.order, self.schedule.rows, int(epoch), places.position[here])
        return rows

    def fill(self, places: Places, out: list[Array]) -> tuple[float, float]:
        """Write the rows at `places` into `out`, whole and in placed dtypes: seconds of reading, of the rest."""
        started = time.perf_counter()
        index = self.locate(places)
        buffers = self.form.read_into(out)
        try:
            self._read(places, index, self.form.spec.tree(buffers))
            read = time.perf_counter()
            self.form.finish(buffers, out, places, index)
        except RowError as error:
            for i in np.flatnonzero(index == error.row)[:1]:
                error.add_note(
                    f"feedline: that row stands at epoch {places.epoch[i]}, position {places.position[i]}"
                )
            raise
        return read - started, time.perf_counter() - read

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

    def fill_by_leaf(self, start: Cursor) -> list[Array]:
        """This process's part of the batch at `start`, each leaf reading only its own rows and columns."""
        leaves = []
        for i, (leaf, plan) in enumerate(zip(self.form.spec.leaves, self.form.plans, strict=True)):
            index = self.locate(self.schedule.places(start, plan.rows))
            values = aligned_empty(plan.local_shape, leaf.dtype)
            self.source.read_leaf(i, index, plan.columns, values)  # type: ignore[attr-defined]
            placed = values if leaf.dtype == leaf.placed else aligned_empty(plan.local_shape, leaf.placed)
            if placed is not values:
                cast_into(placed, values, leaf, index)
            leaves.append(placed)
        return leaves

    def masked(self, leaves: list[Array], start: Cursor) -> list[Array]:
        """The leaves of the batch at `start`, with `valid` where the form has it."""
        if self.form.mask is None:
            return leaves
        return self.form.with_mask(leaves, self.schedule.places(start, self.form.mask).valid)


class LocalBatches(grain.MapDataset[Element]):
    """Elements k·parts to (k + 1)·parts − 1 write the parts of process-local batch k after `origin`.

    Different Grain threads write them into one set of buffers. The element that is done last carries
    the leaves; the others carry none. Elements of one batch must not be asked for twice.
    """

    def __init__(self, recipe: Recipe, origin: Cursor, parts: int, advanced: Callable[[], None] | None) -> None:
        super().__init__()
        self.parts = 1 if recipe.reads_by_leaf else min(parts, len(recipe.form.rows))
        self._recipe = recipe
        self._origin = origin
        self._advanced = advanced
        self._count = recipe.schedule.batches_from(origin)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[list[Array], int]] = {}
        """Batches of which parts are missing: their buffers, and how many parts are. Held by _lock."""

    def __len__(self) -> int:
        return min(self._count * self.parts, ENDLESS)

    def __getitem__(self, element: Any) -> Element:  # type: ignore[override]  # Grain also slices; nobody does here
        k, part = divmod(int(element), self.parts)
        start = self._recipe.schedule.batch_at(self._origin, k)
        if self._recipe.reads_by_leaf:
            began = time.perf_counter()
            leaves, times = self._recipe.fill_by_leaf(start), (time.perf_counter() - began, 0.0)
        else:
            leaves, times = self._fill_part(k, part, start)
        if self._advanced is not None:
            self._advanced()
        return Element(self._recipe.masked(leaves, start) if leaves else [], *times)

    def _fill_part(self, k: int, part: int, start: Cursor) -> tuple[list[Array], tuple[float, float]]:
        """Write one part; the leaves if that makes the batch whole, else []."""
        form = self._recipe.form
        count = len(form.rows)
        with self._lock:
            if k not in self._open:
                self._open[k] = (form.out.empty(count, placed=True), self.parts)
            leaves = self._open[k][0]
        here = slice(count * part // self.parts, count * (part + 1) // self.parts)
        places = self._recipe.schedule.places(start, form.rows[here])
        times = self._recipe.fill(places, [leaf[here] for leaf in leaves])
        with self._lock:
            missing = self._open.pop(k)[1] - 1
            if missing:
                self._open[k] = (leaves, missing)
        return ([] if missing else form.cut(leaves)), times

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self._recipe, "origin": self._origin, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["recipe"], state["origin"], state["parts"], None)  # type: ignore[misc]
