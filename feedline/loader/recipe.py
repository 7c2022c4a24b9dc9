"""What decides the values of a process-local batch, for every source with random access: rows in, buffers out."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from feedline import order
from feedline.errors import FeedError, RowError
from feedline.loader.bad_rows import BadRow, check_is_of_a_row, failing, raise_located
from feedline.loader.buffers import Buffers
from feedline.loader.form import Indices, LocalForm
from feedline.loader.sources import RowSource
from feedline.loader.spec import Array, cast_into
from feedline.options import Order
from feedline.schedule import Cursor, Places, Schedule

_STRETCH = 1 << 16
"""Positions whose rows are computed at once for batches of fewer rows: a call costs some 70 µs for any number of
positions, as much as copying a MiB, and hands the interpreter's lock over seventy times."""


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


class Filled(NamedTuple):
    """What a part of a batch took, and which of its rows were bad."""

    read_s: float
    transform_s: float
    bad: list[BadRow]


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

    def fill(self, found: Sequence[Found], part: Part, buffers: Buffers) -> Filled:
        """Write a part of the batch that was `found` into its `buffers`.

        Raises:
          RowError: a row is bad, and none is to stand in for it; it says which, and where that stands in the run.
        """
        started = time.perf_counter()
        if self.form.by_leaf:
            self._fill_by_leaf(found, part, buffers)
            return Filled(time.perf_counter() - started, 0.0, [])
        here = part.of(len(self.form.rows))
        mine = found[0].part(here)
        try:
            read_s = self._write(mine, here, buffers)
        except RowError as error:
            bad = self._write_good(mine, here, buffers, error)
            return Filled(time.perf_counter() - started, 0.0, bad)
        return Filled(read_s, time.perf_counter() - started - read_s, [])

    def _write(self, found: Found, here: slice, buffers: Buffers) -> float:
        """Read rows into `here` of `read`, transform and cast them into `leaves`: the seconds of the read."""
        started = time.perf_counter()
        read = [leaf[here] for leaf in buffers.read]
        self._read(found.places, found.rows, self.form.spec.tree(read))
        read_s = time.perf_counter() - started
        self.form.finish(read, buffers.leaves, here, found.places, found.rows)
        return read_s

    def _write_good(self, found: Found, here: slice, buffers: Buffers, error: RowError) -> list[BadRow]:
        """As `_write`, which failed with `error`, but with other rows in the place of the bad ones."""

        def write(some: slice) -> None:
            self._write(found.part(some), _within(here, some), buffers)

        if self.form.bad_rows == "raise":
            raise_located(write, found.places, found.rows, error)
        bad = []
        for i, failure in failing(write, found.rows, error):
            one = slice(i, i + 1)
            spare = self._write_spare(found.part(one), _within(here, one), buffers, failure)
            if found.places.valid[i]:  # padding repeats rows, each of which counts once
                at = int(self.form.rows[here.start + i])
                bad.append(BadRow.of(failure, at, substitute=spare))
        return bad

    def _write_spare(self, found: Found, here: slice, buffers: Buffers, error: RowError) -> int:
        """Write another row in the place of the one that was `found` to be bad: its row index."""
        epoch, position = int(found.places.epoch[0]), int(found.places.position[0])
        error.locate(int(found.rows[0]), epoch, position)
        spares = order.spares_at(self.order.seed, self.schedule.rows, epoch, position)
        for spare in spares.tolist():
            try:
                self._write(Found(found.places, np.array([spare])), here, buffers)
            except RowError as again:
                check_is_of_a_row(again)
            else:
                return int(spare)
        none = RowError(
            f"another row stands in for a bad one, and none of {len(spares)} that were drawn could be had either; "
            f"mend the source. This one: {error.message}",
            stage="read",
            file=error.file,
        )
        none.locate(int(found.rows[0]), epoch, position)
        raise none from error

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
            raise self._failure(index, error) from error

    def _fill_by_leaf(self, found: Sequence[Found], part: Part, buffers: Buffers) -> None:
        """Each leaf reads only its own rows and columns."""
        for i, plan in enumerate(self.form.plans):
            here = part.of(len(plan.rows))
            mine = found[i].part(here)
            write = functools.partial(self._write_leaf, i, mine.rows, here, buffers)
            try:
                write(slice(0, len(mine.rows)))
            except RowError as error:
                raise_located(write, mine.places, mine.rows, error)

    def _write_leaf(self, i: int, rows: Indices, here: slice, buffers: Buffers, some: slice) -> None:
        """Read and cast this process's rows and columns of one leaf: `some` of the `rows`, which go to `here`."""
        rows, there = rows[some], _within(here, some)
        read, placed = buffers.read[i], buffers.leaves[i]
        try:
            self.source.read_leaf(i, rows, self.form.plans[i].columns, read[there])  # type: ignore[attr-defined]
        except FeedError:
            raise
        except Exception as error:
            raise self._failure(rows, error) from error
        if placed is not read:
            cast_into(placed[there], read[there], self.form.spec.leaves[i], rows)

    def _failure(self, rows: Indices, error: Exception) -> RowError:
        told = "this row" if len(rows) == 1 else f"{len(rows)} rows, the first of them {rows[0]},"
        return RowError(
            f"{type(self.source).__name__} failed to read {told} with {type(error).__name__}: {error}",
            stage="read",
        )

    def masked(self, leaves: list[Array], start: Cursor, bad: Sequence[BadRow]) -> list[Array]:
        """The leaves of the batch at `start`, with `valid` where the form has it."""
        if self.form.mask is None:
            return leaves
        return self.form.with_mask(leaves, self.schedule.places(start, self.form.mask).valid, bad)


def _within(here: slice, some: slice) -> slice:
    """`some` of the rows `here`."""
    return slice(here.start + some.start, here.start + some.stop)


@functools.lru_cache(maxsize=8)
def _stretch(how: Order, rows: int, epoch: int, start: int) -> Indices:
    """The rows at `_STRETCH` positions of an epoch: half a MiB. The last stretch has fewer."""
    return order.rows_at(how, rows, epoch, np.arange(start, min(start + _STRETCH, rows)))
