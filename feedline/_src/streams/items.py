"""Writes items of a stream into the buffers of a batch. The first item of the stream replaces a bad item."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from feedline._src.errors import RowError
from feedline._src.loader.buffers import Buffers
from feedline._src.loader.form import LocalForm
from feedline._src.order.schedule import BatchPositions
from feedline._src.record import Stopwatch
from feedline._src.rows.bad_rows import BadRow, find_bad_rows, raise_located
from feedline._src.rows.record_leaves import write_record
from feedline._src.rows.spec import RowSpec
from feedline._src.runtime.annotations import annotation


class HostTimes(NamedTuple):
    """Seconds in the transform, seconds of casts and cuts after it, and the processor time of both."""

    transform_s: float
    stage_s: float
    cpu_s: float


def write_items(
    form: LocalForm, spec: RowSpec, first: Any, items: Iterable[Any], positions: BatchPositions, buffers: Buffers
) -> tuple[list[BadRow], HostTimes]:
    """Write the rows of a batch that this process supplies.

    Args:
      form: the form of the batch.
      spec: the spec of an item.
      first: the stream's first item, which is the substitute for bad items: every process has it, wherever it
        resumed, but no process has the items of the others.
      items: the items of the rows `form.rows`.
      positions: the positions of these rows. A stream has no row indices; positions are used in their place.
      buffers: the memory of the batch.

    Returns:
      The bad rows, and the time that was spent after the items had been written.

    Raises:
      RowError: an item is bad, and `bad_rows` is "raise" or the first item is refused as well.
    """
    records = list(items)
    spent = HostTimes(0.0, 0.0, 0.0)

    def write(here: slice) -> None:
        nonlocal spent
        for i in range(here.start, here.stop):
            try:
                write_record(records[i], spec, buffers.read, i)
            except (TypeError, ValueError, OverflowError) as error:
                message = f"every item must have the form of the first: {error}"
                raise RowError(message, stage="read", row=int(positions.position[i])) from error
        watch = Stopwatch()
        part, whole = positions.part(here), [leaf[here] for leaf in buffers.read]
        if form.transform is not None:
            whole = form.transformed(form.transform, whole, part, part.position)
        transform_s, transform_cpu_s = watch.lap()
        with annotation("stage"):
            form.write(whole, buffers.leaves, here, part.position)
        stage_s, stage_cpu_s = watch.lap()
        spent = HostTimes(
            spent.transform_s + transform_s, spent.stage_s + stage_s, spent.cpu_s + transform_cpu_s + stage_cpu_s
        )

    bad: list[BadRow] = []
    try:
        write(slice(0, len(records)))
    except RowError as error:
        if form.bad_rows == "raise":
            raise_located(write, positions, positions.position, error)
        for i, failure in find_bad_rows(write, positions.position, error):
            position = int(positions.position[i])
            failure.locate(position, int(positions.epoch[i]), position)
            records[i] = first
            try:
                write(slice(i, i + 1))
            except RowError as again:
                again.locate(position, int(positions.epoch[i]), position)
                raise
            if positions.valid[i]:
                bad.append(BadRow.of(failure, int(form.rows[i]), substitute=0))
    return bad, spent
