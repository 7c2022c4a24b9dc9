"""Prints the description of a feed: rows, first rows, and who reads what."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.box import SIMPLE, SQUARE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from feedline._src.tools.inspect.contents import Contents, leaf_bytes, row_bytes, shown
from feedline._src.tools.inspect.description import Description
from feedline._src.tools.inspect.drawing import Grid, grid_of
from feedline._src.tools.inspect.show_sizes import epochs, memory
from feedline._src.tools.inspect.words import in_bytes, in_spans, in_words, leaf_title, numbered, plural

_MOST_LEAVES, _MOST_PROCESSES, _MOST_LINED = 12, 8, 8
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue")


def show(description: Description, source: str, console: Console) -> None:
    """Print the description for a reader who sees it for the first time."""
    for part in _parts(description, source):
        console.print(part, markup=False, highlight=False)


def _parts(description: Description, source: str) -> Iterator[RenderableType]:
    contents, size = description.contents, f"{description.described_size:,}"
    for problem in description.problems:
        yield Text(f"A feed refuses this. {problem}", "red")
    yield Text(f"{source}: {_amount(contents)}", "bold")
    yield from _leaves(contents)
    if contents.transformed:
        yield "A transform on the host makes of them:"
        yield from _placed(description)
    yield Text("\nFirst item" if contents.lanes else "\nFirst rows", "bold")
    yield from _first_rows(contents)
    yield Text(f"\nWhich process reads which rows of a batch of {size}", "bold")
    yield from _where(description)
    for blocks in description.blocks:
        names = [leaf_title(description.names[i]) for i in blocks.leaves]
        spec = in_words(description.batch[blocks.leaves[0]].sharding)
        yield f"\n{_some(names)}: {spec}"
        yield _drawn(grid_of(description, blocks))
    yield _processes(description)
    if any(each.cuts for each in description.reads):
        yield "Each process reads whole rows, and cuts the columns for its devices afterwards."
    yield Text(f"\nMemory for batches of {size} rows", "bold")
    yield from memory(description)
    yield Text("\nEpochs and batch sizes", "bold")
    yield from epochs(description)


def _amount(contents: Contents) -> str:
    size = row_bytes(contents.spec)
    if contents.rows is not None:
        return f"{plural(contents.rows, 'row')} of {in_bytes(size)}, {in_bytes(size * contents.rows)} in all"
    if not contents.lanes:
        return f"rows of {in_bytes(size)}, repeated without end"
    kind = "a stream" if contents.lanes == 1 else f"a stream of {contents.lanes} lanes"
    return f"{kind}, items of {in_bytes(size)}. Only reading it to its end tells how many."


def _leaves(contents: Contents) -> Iterator[RenderableType]:
    placed = [] if contents.transformed else ["placed as"]
    table = _table("leaf", "shape", "dtype", *placed, "bytes a row")
    for leaf in contents.spec.leaves[:_MOST_LEAVES]:
        placed = [] if contents.transformed else [leaf.placed_dtype.name]
        _add(table, leaf_title(leaf.name), _shape(leaf.shape), leaf.dtype.name, *placed, f"{leaf_bytes(leaf):,}")
    yield from _with_rest(table, len(contents.spec.leaves))


def _placed(description: Description) -> Iterator[RenderableType]:
    leaves = description.contents.out.leaves
    table = _table("leaf", "shape", "placed as")
    for leaf in leaves[:_MOST_LEAVES]:
        _add(table, leaf_title(leaf.name), _shape(leaf.shape), leaf.placed_dtype.name)
    yield from _with_rest(table, len(leaves))


def _first_rows(contents: Contents) -> Iterator[RenderableType]:
    one = "item" if contents.lanes else "row"
    table = _table("leaf", *(f"{one} {row}" for row in range(len(contents.first[0]))))
    for leaf, values in list(zip(contents.spec.leaves, contents.first, strict=True))[:_MOST_LEAVES]:
        _add(table, leaf_title(leaf.name), *map(shown, values))
    yield from _with_rest(table, len(contents.spec.leaves))


def _where(description: Description) -> Iterator[RenderableType]:
    axes = ", ".join(f"{name}={size}" for name, size in description.axes.items())
    devices, several = math.prod(description.axes.values()), description.processes > 1
    each = f", {devices // description.processes} in each" if several else ""
    processes = plural(description.processes, "process", "processes")
    yield f"Mesh {axes}: {plural(devices, 'device')} in {processes}{each}."
    used = {device.id for leaf in description.batch for device in leaf.sharding.device_set}
    if len(used) < devices:
        without = description.processes - len(description.reads)
        refused = f" {plural(without, 'process has', 'processes have')} none of these, and cannot build it."
        yield f"The feed uses {len(used)} of them.{refused if without else ''}"
    if description.described_size != description.options.first_batch_size:
        yield (
            f"Batches of {description.options.first_batch_size:,} rows do not fit; this is for "
            f"{description.described_size:,}."
        )
    reader = ", and process 1 reads it" if several else ""
    yield f"d3{' p1' if several else ''} in a block: device 3 holds it{reader}."


def _drawn(grid: Grid) -> Table:
    table = Table("rows", *grid.columns, box=SQUARE, show_lines=len(grid.rows) <= _MOST_LINED)
    for label, cells in zip(grid.rows, grid.cells, strict=True):
        table.add_row(label, *(Text(cell.text, _colour(cell.process)) for cell in cells))
    return table


def _processes(description: Description) -> Table:
    has_lanes = description.contents.lanes > 0
    table = _table("process", "devices", "reads rows", *(["lanes"] if has_lanes else []), "bytes a batch")
    reads = description.reads
    left_out = range(_MOST_PROCESSES - 2, len(reads) - 1) if len(reads) > _MOST_PROCESSES else range(0)
    for i, each in enumerate(reads):
        if i in left_out:
            if i == left_out[0]:
                _add(table, f"… {len(left_out)} more")
            continue
        lanes = [numbered(description.lanes_of(each))] if has_lanes else []
        cells = [str(each.process), numbered(each.devices), in_spans(each.rows), *lanes]
        _add(table, *cells, in_bytes(each.local_bytes), style=_colour(each.process))
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE)


def _add(table: Table, *cells: str, style: str = "") -> None:
    table.add_row(*(Text(cell, style) for cell in cells))  # plain strings would be taken for markup


def _with_rest(table: Table, leaves: int) -> Iterator[RenderableType]:
    yield table
    if leaves > _MOST_LEAVES:
        yield f"  and {leaves - _MOST_LEAVES} more leaves, which --json lists\n"


def _colour(process: int) -> str:
    return _COLOURS[process % len(_COLOURS)] if process >= 0 else ""


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one value"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_LEAVES
    return ", ".join([*names[:_MOST_LEAVES], *([f"and {more} more"] if more > 0 else [])])
