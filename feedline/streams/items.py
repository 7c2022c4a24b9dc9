"""Writes items of a stream into the buffers of a batch. The first item of the stream replaces a bad item."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from feedline.errors import RowError
from feedline.loader.buffers import Buffers
from feedline.loader.form import LocalForm
from feedline.order.schedule import BatchPositions
from feedline.rows.bad_rows import BadRow, find_bad_rows, raise_located
from feedline.rows.record_leaves import write_record
from feedline.rows.spec import RowSpec


def write_items(
    form: LocalForm, spec: RowSpec, first: Any, items: Iterable[Any], positions: BatchPositions, buffers: Buffers
) -> tuple[float, list[BadRow]]:
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
      The time at which the last item had been written and the transform began, by `time.perf_counter`; and the bad
      rows.

    Raises:
      RowError: an item is bad, and `bad_rows` is "raise" or the first item is refused as well.
    """
    records = list(items)
    written = 0.0

    def write(here: slice) -> None:
        nonlocal written
        for i in range(here.start, here.stop):
            try:
                write_record(records[i], spec, buffers.read, i)
            except (TypeError, ValueError, OverflowError) as error:
                message = f"every item must have the form of the first: {error}"
                raise RowError(message, stage="read", row=int(positions.position[i])) from error
        written = time.perf_counter()
        part = positions.part(here)
        form.finish([leaf[here] for leaf in buffers.read], buffers.leaves, here, part, part.position)

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
    return written, bad
