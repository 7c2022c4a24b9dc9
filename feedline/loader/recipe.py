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
from feedline.jax_settings import JaxSettings
from feedline.loader.bad_rows import BadRow, check_is_of_a_row, failing, raise_located
from feedline.loader.buffers import Buffers
from feedline.loader.form import Indices, LocalForm
from feedline.loader.loaded import HostBatch
from feedline.loader.sources import RowSource
from feedline.loader.spec import cast_into
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
    """Rows of a batch: where they stand in it, and in the source.

    Attributes:
      schedule: of the run.
      start: of the batch.
      offsets: int64[k], ascending: which rows of the batch.
      rows: int64[k], read-only: the row index of each.
    """

    schedule: Schedule
    start: Cursor
    offsets: Indices
    rows: Indices

    @property
    def places(self) -> Places:
        """Where they stand in the run, made when it is asked for: a plain read has no use for it."""
        return self.schedule.places(self.start, self.offsets)

    def part(self, here: slice) -> Found:
        """Some of these rows, one after the other."""
        if here == slice(0, len(self.rows)):
            return self
        return self._replace(offsets=self.offsets[here], rows=self.rows[here])


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
      settings: of JAX, that hold while rows are read and transformed.
    """

    source: RowSource
    order: Order
    schedule: Schedule
    form: LocalForm
    settings: JaxSettings = dataclasses.field(default_factory=JaxSettings.of_this_thread)

    def locate(self, start: Cursor, offsets: Indices) -> Indices:
        """int64[k], read-only: the row index of each of these rows, ascending, of the batch at `start`."""
        first, last = start.position + int(offsets[0]), start.position + int(offsets[-1])
        if last < self.schedule.rows and last - first < _STRETCH // 4:
            rows = self._near(start, offsets, first, last)
        else:
            places, n = self.schedule.places(start, offsets), self.schedule.rows
            parts = [order.rows_at(self.order, n, of, places.position[here]) for of, here in places.runs()]
            rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        rows.flags.writeable = False
        return rows

    def _near(self, start: Cursor, offsets: Indices, first: int, last: int) -> Indices:
        """As `locate`, of positions `first` to `last` of an epoch: parts of stretches that batches share."""
        border = last // _STRETCH * _STRETCH
        known = _stretch(self.order, self.schedule.rows, start.epoch, border)[: last + 1 - border]
        if first < border:
            before = _stretch(self.order, self.schedule.rows, start.epoch, border - _STRETCH)
            known = np.concatenate([before[first - border :], known])
        else:
            known = known[first - border :]
        return known if len(known) == len(offsets) else known[offsets - offsets[0]]

    def found(self, start: Cursor) -> Sequence[Found]:
        """Where the rows of the batch at `start` are: for all leaves, or for each that is read for itself."""
        if not self.form.by_leaf:
            return [self._found(start, self.form.rows)]
        found: list[Found] = []
        for plan, alike in zip(self.form.plans, self._alike, strict=True):
            found.append(self._found(start, plan.rows) if alike == len(found) else found[alike])
        return found

    def _found(self, start: Cursor, offsets: Indices) -> Found:
        return Found(self.schedule, start, offsets, self.locate(start, offsets))

    @functools.cached_property
    def _alike(self) -> list[int]:
        """For each leaf, the first one of which this process supplies the same rows."""
        first: dict[bytes, int] = {}
        return [first.setdefault(plan.rows.tobytes(), i) for i, plan in enumerate(self.form.plans)]

    def fill(self, found: Sequence[Found], part: Part, buffers: Buffers) -> Filled:
        """Write a part of the batch that was `found` into its `buffers`.

        Raises:
          RowError: a row is bad, and none is to stand in for it; it says which, and where that stands in the run.
        """
        with self.settings.stated():
            return self._fill(found, part, buffers)

    def _fill(self, found: Sequence[Found], part: Part, buffers: Buffers) -> Filled:
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
        self._read(found, self.form.spec.tree(read))
        read_s = time.perf_counter() - started
        places = None if self.form.transform is None else found.places
        self.form.finish(read, buffers.leaves, here, places, found.rows)
        return read_s

    def _write_good(self, found: Found, here: slice, buffers: Buffers, error: RowError) -> list[BadRow]:
        """As `_write`, which failed with `error`, but with other rows in the place of the bad ones."""

        def write(some: slice) -> None:
            self._write(found.part(some), _within(here, some), buffers)

        if self.form.bad_rows == "raise":
            raise_located(write, found.places, found.rows, error)
        bad, valid = [], found.places.valid
        for i, failure in failing(write, found.rows, error):
            one = slice(i, i + 1)
            spare = self._write_spare(found.part(one), _within(here, one), buffers, failure)
            if valid[i]:  # padding repeats rows, each of which counts once
                at = int(self.form.rows[here.start + i])
                bad.append(BadRow.of(failure, at, substitute=spare))
        return bad

    def _write_spare(self, found: Found, here: slice, buffers: Buffers, error: RowError) -> int:
        """Write another row in the place of the one that was `found` to be bad: its row index."""
        places = found.places
        epoch, position = int(places.epoch[0]), int(places.position[0])
        error.locate(int(found.rows[0]), epoch, position)
        spares = order.spares_at(self.order.seed, self.schedule.rows, epoch, position)
        for spare in spares.tolist():
            try:
                self._write(found._replace(rows=np.array([spare])), here, buffers)
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

    def _read(self, found: Found, out: Any) -> None:
        index = asked = found.rows
        if getattr(self.source, "per_epoch", False):
            places = found.places
            if (int(places.epoch.max()) + 1) * self.schedule.rows > 1 << 63:
                raise ValueError(
                    f"a dataset is asked for element epoch × {self.schedule.rows} + row, to be below 2^63; "
                    f"epoch {places.epoch.max()} is too late for that, seek to an earlier one"
                )
            asked = places.epoch * self.schedule.rows + index
        try:
            returned: Any = self.source.read(asked, out)  # type: ignore[func-returns-value]
            if returned is not None:
                raise TypeError(f"read writes its rows into out, and must not return a {type(returned).__name__}")
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

    def batch(self, start: Cursor, before: Cursor, buffers: Buffers, parts: Sequence[Filled]) -> HostBatch:
        """The batch at `start`, of which all parts are filled. The one before it ended at the cursor `before`."""
        bad = sorted(row for part in parts for row in part.bad)
        leaves = buffers.leaves
        if self.form.mask is not None:
            leaves = self.form.with_mask(leaves, self.schedule.places(start, self.form.mask).valid, bad)
        return HostBatch(
            leaves=leaves,
            after=self.schedule.after(start),
            lanes=None,
            rows=self.schedule.real_rows(start),
            dropped_rows=self.schedule.dropped_rows(before, start),
            read_s=sum(part.read_s for part in parts),
            transform_s=sum(part.transform_s for part in parts),
            bad=bad,
        )


def _within(here: slice, some: slice) -> slice:
    """`some` of the rows `here`."""
    return slice(here.start + some.start, here.start + some.stop)


@functools.lru_cache(maxsize=8)
def _stretch(how: Order, rows: int, epoch: int, start: int) -> Indices:
    """The rows at `_STRETCH` positions of an epoch: half a MiB. The last stretch has fewer."""
    found = order.rows_at(how, rows, epoch, np.arange(start, min(start + _STRETCH, rows)))
    found.flags.writeable = False  # batches look at it, each at a part
    return found
