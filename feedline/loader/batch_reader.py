"""Reads parts of process-local batches into buffers, for every source with random access."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from feedline.errors import FeedError, RowError
from feedline.loader.buffers import Buffers
from feedline.loader.form import Indices, LocalForm
from feedline.loader.loaded import HostBatch
from feedline.options import Order
from feedline.order.epoch import rows_at, substitutes_at
from feedline.order.schedule import BatchPositions, Cursor, Schedule
from feedline.placement.plan import Columns
from feedline.rows.bad_rows import BadRow, check_concerns_a_row, find_bad_rows, raise_located
from feedline.rows.row_source import RowSource, is_columnar
from feedline.rows.spec import cast_into
from feedline.runtime.jax_settings import JaxSettings
from feedline.sources.arrays import ArraySource
from feedline.sources.records import RecordSource


class Part(NamedTuple):
    """One of several equal parts of a batch."""

    which: int
    parts: int

    def of(self, rows: int) -> slice:
        """Which of `rows` rows belong to it."""
        return slice(rows * self.which // self.parts, rows * (self.which + 1) // self.parts)


class BatchRows(NamedTuple):
    """Rows of a batch: where they stand in it, and in the source.

    Attributes:
      schedule: of the run.
      start: of the batch.
      offsets: int64[k], ascending: which rows of the batch.
      indices: int64[k], read-only: the row index of each.
    """

    schedule: Schedule
    start: Cursor
    offsets: Indices
    indices: Indices

    @property
    def places(self) -> BatchPositions:
        """Where they stand in the run. Computed when it is asked for: plain reads do not need it."""
        return self.schedule.positions(self.start, self.offsets)

    def some(self, here: slice) -> BatchRows:
        """Some of these rows, one after the other."""
        return self._replace(offsets=self.offsets[here], indices=self.indices[here])


class _Group(NamedTuple):
    """Leaves of which this process reads the same rows.

    Attributes:
      offsets: int64[k], ascending: these rows of the batch.
      cuts: of each leaf its number, and the columns that are read.
    """

    offsets: Indices
    cuts: list[tuple[int, Columns]]


class Filled(NamedTuple):
    """What a part of a batch took, and which of its rows were bad."""

    read_s: float
    transform_s: float
    bad: list[BadRow]

    @classmethod
    def sum(cls, parts: Sequence[Filled]) -> Filled:
        """Of several parts."""
        return cls(
            sum(part.read_s for part in parts),
            sum(part.transform_s for part in parts),
            [row for part in parts for row in part.bad],
        )


@dataclasses.dataclass(frozen=True)
class BatchReader:
    """Reads this process's part of any batch, for every source with random access. Pure but for the reads.

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
        index = np.empty(len(offsets), np.int64)
        for epoch, some, positions in self.schedule.positions_by_epoch(start, offsets):
            index[some] = rows_at(self.order, self.schedule.rows, epoch, positions)
        index.flags.writeable = False
        return index

    def fill(self, start: Cursor, part: Part, buffers: Buffers) -> Filled:
        """Write a part of the batch at `start` into its `buffers`.

        Raises:
          RowError: a row is bad, and none is to stand in for it; it says which, and where that stands in the run.
        """
        with self.settings.stated():
            filled = [self._fill(group, start, part.of(len(group.offsets)), buffers) for group in self._groups]
        return filled[0] if len(filled) == 1 else Filled.sum(filled)

    @functools.cached_property
    def _groups(self) -> list[_Group]:
        form = self.form
        if not form.by_leaf:
            leaves = enumerate(form.spec.leaves)
            return [_Group(form.rows, [(i, (slice(None),) * len(leaf.shape)) for i, leaf in leaves])]
        groups: dict[bytes, _Group] = {}
        for i, plan in enumerate(form.plans):
            groups.setdefault(plan.rows.tobytes(), _Group(plan.rows, [])).cuts.append((i, plan.columns))
        return list(groups.values())

    def _fill(self, group: _Group, start: Cursor, here: slice, buffers: Buffers) -> Filled:
        """Write the rows `here` of a group."""
        began = time.perf_counter()
        rows = BatchRows(self.schedule, start, group.offsets[here], _NONE)
        try:
            rows = self._locate_and_read(group, rows, here, buffers)
            read_s = time.perf_counter() - began
            self._finish(group, rows, here, buffers)
        except RowError as error:
            if rows.indices is _NONE:
                rows = rows._replace(indices=self.locate(start, rows.offsets))
            bad = self._fill_good(group, rows, here, buffers, error)
            return Filled(time.perf_counter() - began, 0.0, bad)
        return Filled(read_s, time.perf_counter() - began - read_s, [])

    def _locate_and_read(self, group: _Group, rows: BatchRows, here: slice, buffers: Buffers) -> BatchRows:
        """Read rows that have no index yet: with it. Arrays look it up and copy the rows in one call."""
        if not isinstance(self.source, ArraySource):
            rows = rows._replace(indices=self.locate(rows.start, rows.offsets))
            self._read(group, rows, here, buffers)
            return rows
        index = np.empty(len(rows.offsets), np.int64)
        for epoch, some, positions in self.schedule.positions_by_epoch(rows.start, rows.offsets):
            there = _within(here, some)
            cuts = [(i, columns, buffers.read[i][there]) for i, columns in group.cuts]
            index[some] = self.source.read_in_order(self.order, epoch, positions, cuts)
        index.flags.writeable = False
        return rows._replace(indices=index)

    def _write(self, group: _Group, rows: BatchRows, here: slice, buffers: Buffers) -> None:
        self._read(group, rows, here, buffers)
        self._finish(group, rows, here, buffers)

    def _finish(self, group: _Group, rows: BatchRows, here: slice, buffers: Buffers) -> None:
        """Transform and cast what was read of the rows `here`."""
        if self.form.by_leaf:
            for i, _ in group.cuts:
                read, placed = buffers.read[i], buffers.leaves[i]
                if placed is not read:
                    cast_into(placed[here], read[here], self.form.spec.leaves[i], rows.indices)
        else:
            places = None if self.form.transform is None else rows.places
            whole = [leaf[here] for leaf in buffers.read]
            self.form.finish(whole, buffers.leaves, here, places, rows.indices)

    def _fill_good(
        self, group: _Group, rows: BatchRows, here: slice, buffers: Buffers, error: RowError
    ) -> list[BadRow]:
        """Write the rows `here`, of which writing all failed with `error`: other rows in the place of bad ones."""

        def write(some: slice) -> None:
            self._write(group, rows.some(some), _within(here, some), buffers)

        if self.form.bad_rows == "raise":
            raise_located(write, rows.places, rows.indices, error)
        bad, valid = [], rows.places.valid
        for i, failure in find_bad_rows(write, rows.indices, error):
            one = slice(i, i + 1)
            substitute = self._write_substitute(group, rows.some(one), _within(here, one), buffers, failure)
            if valid[i]:  # padding repeats rows, each of which counts once
                bad.append(BadRow.of(failure, int(rows.offsets[i]), substitute=substitute))
        return bad

    def _write_substitute(
        self, group: _Group, rows: BatchRows, here: slice, buffers: Buffers, error: RowError
    ) -> int:
        """Write another row in the place of a bad one: its row index."""
        places = rows.places
        epoch, position = int(places.epoch[0]), int(places.position[0])
        error.locate(int(rows.indices[0]), epoch, position)
        candidates = substitutes_at(self.order.seed, self.schedule.rows, epoch, position)
        for candidate in candidates.tolist():
            try:
                self._write(group, rows._replace(indices=np.array([candidate])), here, buffers)
            except RowError as again:
                check_concerns_a_row(again)
            else:
                return int(candidate)
        none = RowError(
            f"another row stands in for a bad one, and none of {len(candidates)} that were drawn could be had "
            f"either; mend the source. This one: {error.message}",
            stage="read",
            file=error.file,
        )
        none.locate(int(rows.indices[0]), epoch, position)
        raise none from error

    def _read(self, group: _Group, rows: BatchRows, here: slice, buffers: Buffers) -> None:
        """Read rows of known index."""
        asked = self._elements(rows) if isinstance(self.source, RecordSource) else rows.indices
        try:
            if self.form.by_leaf and is_columnar(self.source):
                for i, columns in group.cuts:
                    self.source.read_leaf(i, rows.indices, columns, buffers.read[i][here])
                return
            out = self.form.spec.tree([leaf[here] for leaf in buffers.read])
            returned: Any = self.source.read(asked, out)  # type: ignore[func-returns-value]
            if returned is not None:
                raise TypeError(f"read writes its rows into out, and must not return a {type(returned).__name__}")
        except FeedError:
            raise
        except Exception as error:  # of any type: a StopIteration must not pass for the end of the feed
            raise self._failure(rows.indices, error) from error

    def _elements(self, rows: BatchRows) -> Indices:
        """Which elements of a Grain dataset to ask for: other ones in each epoch, for its own random maps."""
        places, n = rows.places, self.schedule.rows
        if (int(places.epoch.max()) + 1) * n > 1 << 63:
            raise ValueError(
                f"a dataset is asked for element epoch × {n} + row, to be below 2^63; "
                f"epoch {places.epoch.max()} is too late for that, seek to an earlier one"
            )
        return places.epoch * n + rows.indices

    def _failure(self, rows: Indices, error: Exception) -> RowError:
        told = "this row" if len(rows) == 1 else f"{len(rows)} rows, the first of them {rows[0]},"
        return RowError(
            f"{type(self.source).__name__} failed to read {told} with {type(error).__name__}: {error}",
            stage="read",
        )

    def batch(self, start: Cursor, before: Cursor, buffers: Buffers, parts: Sequence[Filled]) -> HostBatch:
        """The batch at `start`, of which all parts are filled. The one before it ended at the cursor `before`."""
        filled = Filled.sum(parts)
        leaves = buffers.leaves
        if self.form.mask is not None:
            leaves = self.form.with_mask(leaves, self.schedule.positions(start, self.form.mask).valid, filled.bad)
        return HostBatch(
            leaves=leaves,
            after=self.schedule.after(start),
            lanes=None,
            rows=self.schedule.real_rows(start),
            dropped_rows=self.schedule.dropped_rows(before, start),
            read_s=filled.read_s,
            transform_s=filled.transform_s,
            bad=sorted(filled.bad),
        )


_NONE = np.empty(0, np.int64)
"""The index of rows that were not looked up yet."""


def _within(here: slice, some: slice) -> slice:
    """`some` of the rows `here`."""
    return slice(here.start + some.start, here.start + some.stop)
