"""Reads parts of process-local batches into buffers, for every source with random access."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.loader.buffers import Buffers
from feedline._src.loader.form import Cuts, Indices, LocalForm
from feedline._src.loader.host_batch import HostBatch
from feedline._src.order.epoch import RowOrder
from feedline._src.order.schedule import BatchPositions, Cursor, Schedule
from feedline._src.record import PartTimes, Stopwatch, this_thread, together
from feedline._src.rows.bad_rows import BadRow, check_concerns_a_row, find_bad_rows, raise_located
from feedline._src.rows.source import Cut, Source
from feedline._src.rows.spec import cast_into
from feedline._src.runtime.annotations import annotation
from feedline._src.runtime.jax_settings import JaxSettings


class Part(NamedTuple):
    """Some rows of a process-local batch, and the leaves that are read of them.

    Attributes:
      start: where the batch starts.
      offsets: int64[k], ascending: the rows of the global batch.
      cuts: the leaves, and the columns that are read of each.
      buffers: the memory of the whole batch.
      here: which rows of the buffers are written.
      indices: int64[k], read-only: the row index of each row; `_UNKNOWN` until it is computed.
    """

    start: Cursor
    offsets: Indices
    cuts: Cuts
    buffers: Buffers
    here: slice
    indices: Indices

    def some(self, some: slice) -> Part:
        """Adjacent rows of this part."""
        return self._replace(offsets=self.offsets[some], indices=self.indices[some], here=_within(self.here, some))

    def targets(self, some: slice) -> list[Cut]:
        """Where to write adjacent rows of this part as they are read."""
        there = _within(self.here, some)
        return [(i, columns, self.buffers.read[i][there]) for i, columns in self.cuts]


class PartResult(NamedTuple):
    """How a part was made, and which of its rows were bad."""

    times: PartTimes
    bad: list[BadRow]


@dataclasses.dataclass(frozen=True)
class BatchReader:
    """Reads this process's part of any batch, for every source with random access. Pure but for the reads.

    Attributes:
      source: gives the rows.
      order: determines which row stands at which position.
      schedule: determines which positions batch k holds.
      form: determines which part of them this process supplies.
      settings: JAX's settings while rows are read and transformed.
    """

    source: Source
    order: RowOrder
    schedule: Schedule
    form: LocalForm
    settings: JaxSettings = dataclasses.field(default_factory=JaxSettings.of_this_thread)

    def locate(self, start: Cursor, offsets: Indices) -> Indices:
        """int64[k], read-only: the row index of each of these rows, ascending, of the batch at `start`."""
        index = np.empty(len(offsets), np.int64)
        for epoch, some, positions in self.schedule.positions_by_epoch(start, offsets):
            index[some] = self.order.rows_at(epoch, positions)
        index.flags.writeable = False
        return index

    def padded_length(self, start: Cursor) -> int | None:
        """The length of the ragged leaves of the batch at `start`, the same in each process; None: it has none."""
        if not self.form.ragged:
            return None
        return self.source.padded_length(self.locate(start, np.arange(self.schedule.batch_size)))

    @property
    def tells_source(self) -> bool:
        """Whether the source fetches rows before they are read."""
        return self.source.will_read is not None

    def tell_source(self, start: Cursor, ahead: int) -> bool:
        """Tell the source that the batch at `start` is read in `ahead` batches. False: that is too early."""
        will_read = self.source.will_read
        if will_read is None:
            return True
        return all(will_read(self.locate(start, offsets), ahead) for offsets, _ in self.form.reads)

    def fill(self, start: Cursor, part: int, parts: int, buffers: Buffers) -> PartResult:
        """Write a part of the batch at `start` into its `buffers`: number `part` of `parts` equal ones.

        Raises:
          RowError: a row is bad, and `bad_rows` is "raise" or no substitute was found. It names the row.
        """
        results: list[PartResult] = []
        with self.settings.applied():
            for offsets, cuts in self.form.reads:
                here = _part(offsets, part, parts)
                results.append(self._fill(Part(start, offsets[here], cuts, buffers, here, _UNKNOWN)))
        if len(results) == 1:
            return results[0]
        return PartResult(
            together([each.times for each in results]), [row for each in results for row in each.bad]
        )

    def rows_of(self, start: Cursor, part: int, parts: int) -> tuple[int, int, str | None]:
        """Of what `fill` reads: the number of rows, the row index of the first, and its file, if that is known."""
        offsets, _ = self.form.reads[0]
        rows = self.locate(start, offsets[_part(offsets, part, parts)])
        return len(rows), int(rows[0]), self.source.file_of(int(rows[0]))

    def _fill(self, part: Part) -> PartResult:
        watch, thread = Stopwatch(), this_thread()
        try:
            with annotation("read"):
                part = self._locate_and_read(part)
            read_s, read_cpu_s = watch.lap()
            transform_s = self._finish(part)
            finish_s, finish_cpu_s = watch.lap()
        except RowError as error:
            if part.indices is _UNKNOWN:
                part = part._replace(indices=self.locate(part.start, part.offsets))
            bad = self._replace_bad(part, error)
            read_s, read_cpu_s = watch.total()
            return PartResult(PartTimes(thread, watch.began, read_s, read_cpu_s=read_cpu_s), bad)
        stage_s = finish_s - transform_s
        return PartResult(
            PartTimes(
                thread, watch.began, read_s, transform_s, stage_s, read_cpu_s, finish_cpu_s, len(part.offsets)
            ),
            [],
        )

    def _locate_and_read(self, part: Part) -> Part:
        """Read rows, with one call for each epoch. Returns the part with their indices."""
        found = []
        try:
            for epoch, some, positions in self.schedule.positions_by_epoch(part.start, part.offsets):
                cuts = part.targets(some)
                found.append(self.source.read_ordered(self.order, epoch, positions, cuts))
        except FeedError:
            raise
        except Exception as error:  # of any type: a StopIteration would look like the end of the feed
            raise self._failed(self.locate(part.start, part.offsets), error) from error
        index = found[0] if len(found) == 1 else np.concatenate(found)
        index.flags.writeable = False
        return part._replace(indices=index)

    def _write(self, part: Part) -> None:
        self._read(part)
        self._finish(part)

    def _finish(self, part: Part) -> float:
        """Transform and cast the rows that were read. Returns the seconds in the transform."""
        buffers, here = part.buffers, part.here
        if buffers.direct:
            return 0.0
        if self.form.by_leaf:
            for i, _ in part.cuts:
                read, placed = buffers.read[i], buffers.leaves[i]
                if placed is not read:
                    with annotation("stage"):
                        cast_into(placed[here], read[here], self.form.spec.leaves[i], part.indices)
            return 0.0
        whole, watch = [leaf[here] for leaf in buffers.read], Stopwatch()
        if self.form.transform is not None:
            whole = self.form.transformed(self.form.transform, whole, self._positions(part), part.indices)
        transform_s, _ = watch.lap()
        with annotation("stage"):
            self.form.write(whole, buffers.leaves, here, part.indices)
        return transform_s

    def _positions(self, part: Part) -> BatchPositions:
        return self.schedule.positions(part.start, part.offsets)

    def _replace_bad(self, part: Part, error: RowError) -> list[BadRow]:
        """Write a part again that failed with `error`, with a substitute for each bad row."""

        def write(some: slice) -> None:
            self._write(part.some(some))

        positions = self._positions(part)
        if self.form.bad_rows == "raise":
            raise_located(write, positions, part.indices, error)
        bad = []
        for i, failure in find_bad_rows(write, part.indices, error):
            substitute = self._write_substitute(part.some(slice(i, i + 1)), failure)
            if positions.valid[i]:  # padding repeats rows, each of which counts once
                bad.append(BadRow.of(failure, int(part.offsets[i]), substitute=substitute))
        return bad

    def _write_substitute(self, part: Part, error: RowError) -> int:
        """Write another row where this part has one bad row. Returns the row index of the substitute."""
        row, positions = int(part.indices[0]), self._positions(part)
        epoch, position = int(positions.epoch[0]), int(positions.position[0])
        error.locate(row, epoch, position)
        candidates = self.order.substitutes(epoch, position, row)
        for candidate in candidates.tolist():
            try:
                self._write(part._replace(indices=np.array([candidate])))
            except RowError as again:
                check_concerns_a_row(again)
            else:
                return int(candidate)
        none = RowError(
            f"another row must replace a bad one, and all {len(candidates)} that were drawn are bad, too; "
            f"repair the source. The first bad row: {error.message}",
            stage="read",
            file=error.file,
        )
        none.locate(row, epoch, position)
        raise none from error

    def _read(self, part: Part) -> None:
        """Read rows of known index."""
        at = self.form.rows_at(self._positions(part), part.indices)
        try:
            self.source.read_cuts(at, part.targets(slice(0, len(part.offsets))))
        except FeedError:
            raise
        except Exception as error:
            raise self._failed(part.indices, error) from error

    def _failed(self, rows: Indices, error: Exception) -> RowError:
        which = "this row" if len(rows) == 1 else f"{len(rows)} rows, the first of them {rows[0]},"
        return RowError(
            f"{self.source.kind} failed to read {which} with {type(error).__name__}: {error}", stage="read"
        )

    def batch(self, start: Cursor, before: Cursor, buffers: Buffers, results: Sequence[PartResult]) -> HostBatch:
        """The batch at `start`, of which all parts are filled. The one before it ended at the cursor `before`."""
        leaves, bad = buffers.leaves, [row for each in results for row in each.bad]
        if self.form.mask is not None:
            valid = self.schedule.positions(start, self.form.mask).valid
            leaves = self.form.with_mask(leaves, valid, bad)
        return HostBatch(
            leaves=leaves,
            after=self.schedule.after(start),
            lanes=None,
            rows=self.schedule.real_rows(start),
            dropped_rows=self.schedule.dropped_rows(before, start),
            parts=[each.times for each in results],
            bad=sorted(bad),
        )


_UNKNOWN = np.empty(0, np.int64)
"""`Part.indices` before they are computed."""


def _part(offsets: Indices, part: int, parts: int) -> slice:
    """Number `part` of `parts` equal parts of the offsets."""
    return slice(len(offsets) * part // parts, len(offsets) * (part + 1) // parts)


def _within(here: slice, some: slice) -> slice:
    """The rows `some` of the rows `here`."""
    return slice(here.start + some.start, here.start + some.stop)
