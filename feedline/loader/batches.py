"""Position → process-local batch: the element of a `grain.MapDataset`, for every source with random access."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain

from feedline.loader.bad_rows import BadRow
from feedline.loader.buffers import BatchBuffers, Buffers
from feedline.loader.recipe import Found, Part, Recipe
from feedline.loader.spec import Array
from feedline.schedule import ENDLESS, Cursor


class Element(NamedTuple):
    """What one element of `LocalBatches` gives: the leaves and bad rows, if it completed its batch, and times."""

    leaves: list[Array]
    read_s: float
    transform_s: float
    bad: list[BadRow]


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
        self._open: dict[int, tuple[Sequence[Found], Buffers, int, list[BadRow]]] = {}
        """Batches of which parts are missing: their rows, their buffers, how many parts are, and the bad rows
        of the other parts. Held by _lock."""

    def __len__(self) -> int:
        return min(self._count * self.parts, ENDLESS)

    def __getitem__(self, element: Any) -> Element:  # type: ignore[override]  # Grain also slices; nobody does here
        k, part = divmod(int(element), self.parts)
        start = self._recipe.schedule.batch_at(self._origin, k)
        with self._lock:
            if k not in self._open:
                # under the lock: the order is a hundred NumPy calls, each of which lets go of the interpreter's
                # lock and takes it back, so two threads that look up at once take twice as long
                self._open[k] = self._recipe.found(start), self._buffers.lease(), self.parts, []
            found, buffers, _, bad = self._open[k]
        filled = self._recipe.fill(found, Part(part, self.parts), buffers)
        with self._lock:
            missing = self._open.pop(k)[2] - 1
            bad += filled.bad
            if missing:
                self._open[k] = found, buffers, missing, bad
        if self._advanced is not None:
            self._advanced()
        if missing:
            return Element([], filled.read_s, filled.transform_s, [])
        return Element(
            self._recipe.masked(buffers.leaves, start, bad), filled.read_s, filled.transform_s, sorted(bad)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self._recipe, "buffers": self._buffers, "origin": self._origin, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
