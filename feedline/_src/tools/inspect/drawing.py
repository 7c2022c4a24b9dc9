"""The drawing of a batch: a grid of its blocks, with the devices that hold each and the processes that read it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from feedline._src.tools.inspect.description import Description
from feedline._src.tools.inspect.reads import Blocks
from feedline._src.tools.inspect.words import in_spans, numbered, plural

_MOST_ROWS, _MOST_COLUMNS = 12, 6
"""A grid of more blocks is drawn with adjacent blocks of the same processes in one, and then cut in the middle."""


class Cell(NamedTuple):
    """A block of the drawing, or several adjacent ones.

    Attributes:
      text: its devices and processes.
      process: the first of its processes, for the colour; -1 for blocks that are left out.
    """

    text: str
    process: int


class Grid(NamedTuple):
    """A drawing as text.

    Attributes:
      columns: a label for each column.
      rows: a label for each row.
      cells: of each row.
    """

    columns: list[str]
    rows: list[str]
    cells: list[list[Cell]]


def grid_of(description: Description, blocks: Blocks) -> Grid:
    """The drawing of some leaves that are divided in the same way."""
    process_of = {device: each.process for each in description.reads for device in each.devices}

    def readers(row: int, column: int) -> tuple[int, ...]:
        return tuple(sorted({process_of[device] for device in blocks.devices.get((row, column), ())}))

    height, width = len(blocks.row_parts), len(blocks.column_parts)
    rows = _groups(height, _MOST_ROWS, lambda row: [readers(row, column) for column in range(width)])
    columns = _groups(width, _MOST_COLUMNS, lambda column: [readers(row, column) for row in range(height)])

    def cell(group: Sequence[int], across: Sequence[int]) -> Cell:
        if not (_is_drawn(group) and _is_drawn(across)):
            return Cell("…", -1)
        here = list(itertools.product(group, across))
        devices = {device for block in here for device in blocks.devices.get(block, ())}
        processes = {process for block in here for process in readers(*block)}
        several = f" {numbered(processes, 'p')}" if description.processes > 1 else ""
        return Cell(f"{numbered(devices, 'd')}{several}", min(processes, default=-1))

    return Grid(
        [_column_label(description, blocks, across) for across in columns],
        [_row_label(blocks, group) for group in rows],
        [[cell(group, across) for across in columns] for group in rows],
    )


def _groups(count: int, most: int, same: Callable[[int], object]) -> list[list[int]]:
    """Indices below `count`, in at most `most` groups. A group that starts with -1 stands for those left out."""
    single = [[i] for i in range(count)]
    if count <= most:
        return single
    joined = [list(group) for _, group in itertools.groupby(range(count), same)]
    if len(joined) <= most:
        return joined
    tail = most // 3
    left_out = [i for group in joined[most - tail - 1 : -tail] for i in group]
    return [*joined[: most - tail - 1], [-1, *left_out], *joined[-tail:]]


def _is_drawn(group: Sequence[int]) -> bool:
    return group[0] >= 0


def _row_label(blocks: Blocks, group: Sequence[int]) -> str:
    if not _is_drawn(group):
        return f"… {len(group) - 1} more"
    label = in_spans([(blocks.row_parts[group[0]][0], blocks.row_parts[group[-1]][1])])
    return label if len(group) == 1 else f"{label} in {plural(len(group), 'block')}"


def _column_label(description: Description, blocks: Blocks, group: Sequence[int]) -> str:
    """The columns of a block; of leaves with several widths the part."""
    shares = blocks.column_parts
    if not shares[0]:
        return "whole rows"
    if not _is_drawn(group):
        return f"… {len(group) - 1} more"
    first, last = group[0], group[-1]
    widths = {description.batch[i].shape[1 : 1 + len(shares[0])] for i in blocks.leaves}
    if len(widths) > 1 or (first != last and len(shares[0]) > 1):
        part = f"{first + 1}" if first == last else f"{first + 1}–{last + 1}"
        return f"columns, part {part} of {len(shares)}"
    (width,) = widths
    spans = [
        in_spans([(int(start[0] * size), int(stop[1] * size))])
        for start, stop, size in zip(shares[first], shares[last], width, strict=True)
    ]
    return f"columns {' × '.join(spans)}"
