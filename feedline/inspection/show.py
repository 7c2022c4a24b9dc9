"""Prints the description of a feed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE, SQUARE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from feedline.inspection.description import Description
from feedline.inspection.drawing import Grid, grid_of
from feedline.inspection.sizes import Epoch, next_sizes, whole_sizes
from feedline.inspection.subject import Subject, row_bytes, shown
from feedline.inspection.words import in_bytes, in_spans, in_words, leaf_title, numbered, plural

_MOST_LEAVES, _MOST_PROCESSES = 12, 8
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


def show(description: Description, source: str, console: Console) -> None:
    """Print the description for a reader who sees it for the first time."""

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style or None, markup=False, highlight=False)

    def head(line: str) -> None:
        say("")
        say(line, "bold")

    for problem in description.problems:
        say(f"A feed refuses this. {problem}", "red")
    subject = description.subject
    say(f"{source}: {_amount(subject)}", "bold")
    console.print(_leaves(subject))
    if subject.transformed:
        say("A transform on the host makes of them:")
        console.print(_placed(description))
    head("First item" if subject.lanes else "First rows")
    console.print(_first_rows(subject))
    head(f"Who reads what in a batch of {description.drawn_size:,} rows")
    for line in _where(description):
        say(line)
    for blocks in description.blocks:
        names = [leaf_title(description.names[i]) for i in blocks.leaves]
        spec = in_words(description.batch[blocks.leaves[0]].sharding)
        say(f"\n{_some(names)}: {spec}")
        console.print(_drawn(grid_of(description, blocks)))
    console.print(_processes(description))
    head("Memory")
    for line in _memory(description):
        say(line)
    head("Epochs and batch sizes")
    for part in _epochs(description):
        console.print(part, markup=False, highlight=False) if isinstance(part, str) else console.print(part)


def _amount(subject: Subject) -> str:
    size = row_bytes(subject.spec)
    if subject.rows is not None:
        return f"{plural(subject.rows, 'row')} of {in_bytes(size)}, {in_bytes(size * subject.rows)} in all"
    if not subject.lanes:
        return f"rows of {in_bytes(size)}, repeated without end"
    kind = "a stream" if subject.lanes == 1 else f"{subject.lanes} lanes"
    return f"{kind} with items of {in_bytes(size)}; how many is known only once it was read to its end"


def _leaves(subject: Subject) -> Table:
    table = Table("leaf", "shape", "dtype in the source", "dtype on the devices", "bytes a row", box=SIMPLE)
    for leaf in subject.spec.leaves[:_MOST_LEAVES]:
        placed = "" if subject.transformed else leaf.placed_dtype.name
        size = leaf.dtype.itemsize
        for axis in leaf.shape:
            size *= axis
        table.add_row(leaf_title(leaf.name), _shape(leaf.shape), leaf.dtype.name, placed, f"{size:,}")
    return _with_rest(table, len(subject.spec.leaves))


def _placed(description: Description) -> Table:
    table = Table("leaf", "shape", "dtype on the devices", box=SIMPLE)
    for leaf in description.subject.out.leaves[:_MOST_LEAVES]:
        table.add_row(leaf_title(leaf.name), _shape(leaf.shape), leaf.placed_dtype.name)
    return _with_rest(table, len(description.subject.out.leaves))


def _first_rows(subject: Subject) -> Table:
    count = len(subject.first[0])
    table = Table("leaf", *(f"row {row}" for row in range(count)), box=SIMPLE)
    for leaf, values in list(zip(subject.spec.leaves, subject.first, strict=True))[:_MOST_LEAVES]:
        table.add_row(leaf_title(leaf.name), *(shown(value) for value in values))
    return _with_rest(table, len(subject.spec.leaves))


def _with_rest(table: Table, leaves: int) -> Table:
    if leaves > _MOST_LEAVES:
        table.add_row(f"… {leaves - _MOST_LEAVES} more")
    return table


def _where(description: Description) -> Iterator[str]:
    axes = ", ".join(f"{name}={size}" for name, size in description.axes.items())
    devices = sum(len(each.devices) for each in description.reads)
    each = f", {devices // description.processes} in each" if description.processes > 1 else ""
    yield (
        f"Mesh {axes}: {plural(devices, 'device')} in {plural(description.processes, 'process', 'processes')}{each}."
    )
    if description.drawn_size != description.request.batch_size:
        yield f"Batches of {description.request.batch_size:,} rows do not fit; this is for {description.drawn_size:,}."
    if description.processes > 1:
        yield "d3 p1 in a block: device 3 holds it, and process 1 reads it."
    else:
        yield "d3 in a block: device 3 holds it."


def _drawn(grid: Grid) -> Table:
    table = Table("rows", *grid.columns, box=SQUARE, show_lines=True)
    for label, cells in zip(grid.rows, grid.cells, strict=True):
        table.add_row(
            label,
            *(Text(cell.text, _COLOURS[cell.process % len(_COLOURS)] if cell.process >= 0 else "") for cell in cells),
        )
    return table


def _processes(description: Description) -> Table:
    lanes = ["lanes"] if description.subject.lanes else []
    table = Table("process", "devices", "reads rows", *lanes, "bytes a batch", box=SIMPLE)
    reads = description.reads
    cut = len(reads) > _MOST_PROCESSES
    for i, each in enumerate(reads):
        if cut and _MOST_PROCESSES - 2 <= i < len(reads) - 1:
            if i == _MOST_PROCESSES - 2:
                table.add_row(f"… {len(reads) - _MOST_PROCESSES + 1} more")
            continue
        own = [numbered(description.lanes_of(each))] if lanes else []
        style = _COLOURS[each.process % len(_COLOURS)]
        cells = [str(each.process), numbered(each.devices), in_spans(each.rows), *own, in_bytes(each.local_bytes)]
        table.add_row(*(Text(cell, style) for cell in cells))
    return table


def _memory(description: Description) -> Iterator[str]:
    memory, request = description.memory, description.request
    ahead, prefetch = description.ahead, request.prefetch
    name = "window" if description.subject.lanes else "buffer"
    local, shard = memory.host_bytes // (ahead + 1), memory.device_bytes // (prefetch + 2)
    yield f"host, for each process: ({name} {ahead} + 1) × {in_bytes(local)} = {in_bytes(memory.host_bytes)}"
    yield (
        f"  on CPU devices: ({name} {ahead} + prefetch {prefetch} + 3) × {in_bytes(local)} = "
        f"{in_bytes(memory.host_bytes_on_cpu_devices)}"
    )
    yield f"device, for each: (prefetch {prefetch} + 2) × {in_bytes(shard)} = {in_bytes(memory.device_bytes)}"
    most = max(description.reads, key=lambda each: each.buffer_bytes)
    if most.buffer_bytes > most.local_bytes:
        yield (
            f"A host batch is {in_bytes(most.buffer_bytes)}: {in_bytes(most.local_bytes)} as it is placed, and the rest "
            "for leaves as they are read, before they are cast, cut or transformed."
        )
    if request.steps_per_call > 1:
        yield f"Each call delivers {request.steps_per_call} batches, so all of this is as many times as large."


def _epochs(description: Description) -> Iterator[str | Table]:
    rows, size, multiple = description.subject.rows, description.request.batch_size, description.multiple
    lanes = description.subject.lanes
    what = f"{plural(description.shards, 'shard')} of the batch axis"
    rule = f"the {what}" if multiple == description.shards else f"{multiple}, for the {what} and {lanes} lanes"
    yield f"Batch sizes that fit are multiples of {rule}; the next ones are {_listed(next_sizes(size, multiple))}."
    if rows is None:
        yield "The steps of an epoch, and the rows that are left, are known only once the source was read to its end."
        return
    whole = whole_sizes(rows, size, multiple)
    table = Table("batch size", 'steps, "drop"', "left out", 'steps, "pad"', "padding", box=SIMPLE)
    for other in sorted({size, *next_sizes(size, multiple), *whole}):
        epoch = Epoch.of(rows, other)
        cells = [f"{other:,}", *(f"{number:,}" for number in epoch[1:])]
        marked = other == size
        table.add_row(*cells, style="bold" if marked else None)
    yield table
    yield f'"wrap" runs over the ends of epochs and leaves out no row: {rows / size:,.4g} batches an epoch.'
    if not whole:
        yield f"No batch size near {size:,} that fits divides {rows:,} rows."


def _listed(sizes: list[int]) -> str:
    return " and ".join(f"{size:,}" for size in sizes)


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one value"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_LEAVES
    return ", ".join([*names[:_MOST_LEAVES], *([f"and {more} more"] if more > 0 else [])])
