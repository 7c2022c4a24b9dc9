"""What a source holds and the plan of a feed of it, as text or as JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE, SQUARE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from feedline._src.feed_options import FeedOptions
from feedline._src.listen.words import counted
from feedline._src.placement.plan import device_parts
from feedline._src.plan.plan import Plan
from feedline._src.plan.sizes import Epoch
from feedline._src.rows.spec import Array, Leaf, RowSpec
from feedline._src.tools.cli.terminal import in_bytes
from feedline._src.tools.inspect.target import Target

Span = tuple[int, int]
"""Adjacent indices: the first, and the one after the last."""
_MAX_LEAVES, _MAX_PROCESSES, _MAX_BLOCKS, _MAX_COLUMNS = 12, 8, 12, 6
_MAX_LINED, _MAX_SPANS = 8, 3
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue")


def show(source: str, target: Target, console: Console) -> None:
    """Print everything for a reader who sees it for the first time."""
    for part in _parts(source, target):
        console.print(part, markup=False, highlight=False)


def _parts(source: str, target: Target) -> Iterator[RenderableType]:
    plan, size = target.plan, f"{target.plan.fitting_size:,}"
    for problem in plan.problems:
        yield Text(f"A feed refuses this. {problem}", "red")
    yield Text(f"{source}: {_amount(plan)}", "bold")
    yield from _leaves(plan, transformed=target.options.transform is not None)
    yield Text("\nFirst item" if plan.lanes else "\nFirst rows", "bold")
    yield from _first_rows(target)
    yield Text(f"\nWhich process reads which rows of a batch of {size}", "bold")
    yield from _where(target.mesh.shape, plan)
    yield from _drawings(plan)
    yield _processes(plan)
    if any(reads.cuts for reads in plan.reads):
        yield "Each process reads whole rows, and cuts the columns for its devices afterwards."
    yield Text(f"\nMemory for batches of {size} rows", "bold")
    yield from _memory(target.options, plan)
    yield Text("\nEpochs and batch sizes", "bold")
    yield from _epochs(plan)


def _row_leaves(plan: Plan) -> tuple[Leaf, ...]:
    return RowSpec.of(plan.row_spec).leaves


def _amount(plan: Plan) -> str:
    size = sum(leaf.bytes for leaf in _row_leaves(plan))
    if plan.rows is not None:
        return f"{counted(plan.rows, 'row')} of {in_bytes(size)}, {in_bytes(size * plan.rows)} in all"
    if not plan.lanes:
        return f"rows of {in_bytes(size)}, repeated without end"
    kind = "a stream" if plan.lanes == 1 else f"a stream of {plan.lanes} lanes"
    return f"{kind}, items of {in_bytes(size)}. Only reading it to its end tells how many."


def _leaves(plan: Plan, *, transformed: bool) -> Iterator[RenderableType]:
    placed = [] if transformed else ["placed as"]
    rows = []
    for leaf in _row_leaves(plan):
        placed_as = [leaf.placed_dtype.name] if placed else []
        rows.append([leaf_title(leaf.name), _shape(leaf.shape), leaf.dtype.name, *placed_as, f"{leaf.bytes:,}"])
    yield from _table(["leaf", "shape", "dtype", *placed, "bytes a row"], rows)
    if transformed:
        yield "After the transform on the host, a batch has:"
        rows = [[leaf_title(name), _shape(leaf.shape[1:]), leaf.dtype.name] for name, leaf in plan.leaves.items()]
        yield from _table(["leaf", "shape of a row", "placed as"], rows)


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one value"


def _first_rows(target: Target) -> Iterator[RenderableType]:
    one = "item" if target.plan.lanes else "row"
    leaves = zip(_row_leaves(target.plan), target.first, strict=True)
    rows = [[leaf_title(leaf.name), *map(shown, values)] for leaf, values in leaves]
    yield from _table(["leaf", *(f"{one} {row}" for row in range(len(target.first[0])))], rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[RenderableType]:
    """A table of leaves, cut to the first ones."""
    table = Table(*columns, box=SIMPLE)
    for cells in rows[:_MAX_LEAVES]:
        table.add_row(*map(Text, cells))  # plain strings would be taken for markup
    yield table
    if len(rows) > _MAX_LEAVES:
        yield f"  and {len(rows) - _MAX_LEAVES} more leaves, which --json lists\n"


def _where(mesh: Mapping[str, int], plan: Plan) -> Iterator[RenderableType]:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.items())
    devices, several = math.prod(mesh.values()), plan.processes > 1
    each = f", {devices // plan.processes} in each" if several else ""
    yield f"Mesh {axes}: {counted(devices, 'device')} in {counted(plan.processes, 'process')}{each}."
    used = {device for leaf in plan.leaves.values() for device in held(leaf)}
    if len(used) < devices:
        idle = plan.processes - len(plan.reads)
        yield f"The feed uses {len(used)} of them."
        if idle:
            yield f"{counted(idle, 'process')} without one of these cannot build it."
    if plan.fitting_size != plan.batch_size:
        yield f"Batches of {plan.batch_size:,} rows do not fit; this is for {plan.fitting_size:,}."
    reader = ", and process 1 reads it" if several else ""
    yield f"d3{' p1' if several else ''} in a block: device 3 holds it{reader}."


def _processes(plan: Plan) -> Table:
    table = Table(
        "process", "devices", "reads rows", *(["lanes"] if plan.lanes else []), "bytes a batch", box=SIMPLE
    )
    for group in _groups(len(plan.reads), _MAX_PROCESSES):
        if len(group) > 1:
            table.add_row(f"… {len(group)} more")
            continue
        reads = plan.reads[group[0]]
        lanes = [in_spans(spans(reads.lanes))] if plan.lanes else []
        cells = [str(reads.process), in_spans(spans(reads.devices)), in_spans(spans(reads.rows)), *lanes]
        table.add_row(*cells, in_bytes(reads.local_bytes), style=_colour(reads.process))
    return table


# --- the drawing ---

_Columns = tuple[Span, ...]


def _drawings(plan: Plan) -> Iterator[RenderableType]:
    """A grid of blocks for all leaves that are divided in the same way."""
    groups: dict[str, list[tuple[str, list[_Columns]]]] = {}  # names, and the columns of the blocks
    grids: dict[str, tuple[list[Span], list[list[list[int]]]]] = {}  # rows of the blocks, and their devices
    for name, leaf in plan.leaves.items():
        blocks: dict[tuple[Span, _Columns], list[int]] = {}
        for device, (own_rows, *own_columns) in sorted(held(leaf).items()):
            blocks.setdefault((own_rows, tuple(own_columns)), []).append(device)
        rows, columns = sorted({rows for rows, _ in blocks}), sorted({columns for _, columns in blocks})
        grid = rows, [[blocks.get((row, column), []) for column in columns] for row in rows]
        grids[str(grid)] = grid
        groups.setdefault(str(grid), []).append((name, columns))
    for key, leaves in groups.items():
        titles = [leaf_title(name) for name, _ in leaves[:_MAX_LEAVES]]
        more = [f"and {len(leaves) - _MAX_LEAVES} more"] if len(leaves) > _MAX_LEAVES else []
        yield f"\n{', '.join([*titles, *more])}: {in_words(plan.leaves[leaves[0][0]].sharding)}"
        yield _grid(plan, *grids[key], [columns for _, columns in leaves])


def _grid(plan: Plan, rows: list[Span], devices: list[list[list[int]]], columns: list[list[_Columns]]) -> Table:
    """A drawing of the devices of each block, [row][column], with the columns of each leaf."""
    process_of = {device: reads.process for reads in plan.reads for device in reads.devices}
    down, across = _groups(len(rows), _MAX_BLOCKS), _groups(len(columns[0]), _MAX_COLUMNS)
    table = Table("rows", *(_column_label(columns, group) for group in across), box=SQUARE)
    table.show_lines = len(down) <= _MAX_LINED
    for group in down:
        cells = [Text(in_spans([rows[group[0]]]) if len(group) == 1 else f"… {len(group)} more")]
        for part in across:
            holders = devices[group[0]][part[0]]
            if len(group) > 1 or len(part) > 1 or not holders:
                cells.append(Text("…" if holders else ""))
                continue
            processes = sorted({process_of[device] for device in holders})
            readers = f" {in_spans(spans(processes), 'p')}" if plan.processes > 1 else ""
            cells.append(Text(in_spans(spans(holders), "d") + readers, _colour(processes[0])))
        table.add_row(*cells)
    return table


def _column_label(leaves: list[list[_Columns]], group: Sequence[int]) -> str:
    """The label of a column of the grid; for leaves of several widths the part."""
    columns = leaves[0]
    if len(columns) == 1:
        return "whole rows"
    if len(group) > 1:
        return f"… {len(group)} more"
    if any(other != columns for other in leaves):
        return f"columns, part {group[0] + 1} of {len(columns)}"
    last = max(axis for axis, of in enumerate(zip(*columns, strict=True)) if len(set(of)) > 1)
    return f"columns {' × '.join(in_spans([span]) for span in columns[group[0]][: last + 1])}"


def _groups(count: int, most: int) -> list[list[int]]:
    """Indices below `count`, one by one; where there are more than `most`, those in the middle as one group.

    Example:
      >>> _groups(3, 4), _groups(7, 4)
      ([[0], [1], [2]], [[0], [1], [2, 3, 4, 5], [6]])
    """
    if count <= most:
        return [[i] for i in range(count)]
    tail = most // 3
    head = most - 1 - tail
    return [*([i] for i in range(head)), [*range(head, count - tail)], *([i] for i in range(count - tail, count))]


def _colour(process: int) -> str:
    return _COLOURS[process % len(_COLOURS)]


# --- sizes ---


def _memory(options: FeedOptions, plan: Plan) -> Iterator[RenderableType]:
    """The formulas with their numbers."""
    memory, settings = plan.memory, plan.settings
    ahead, prefetch = f"{'window' if plan.lanes else 'buffer'} {settings.buffer}", f"prefetch {settings.prefetch}"
    table = Table.grid(padding=(0, 2, 0, 0))

    def add(what: str, factor: str, count: int, total: int) -> None:
        table.add_row(what, f"({factor}) × {in_bytes(total // count)} = {in_bytes(total)}")

    host, on_cpu_devices = settings.host_batches, settings.host_batches_on_cpu_devices
    add("host, each process", f"{ahead} + 1", host, memory.host_bytes)
    add("  on CPU devices", f"{ahead} + {prefetch} + 3", on_cpu_devices, memory.host_bytes_on_cpu_devices)
    if memory.host_bytes_as_read:
        add("  more, as read", f"{ahead} + 1", host, memory.host_bytes_as_read)
    add("device, each", f"{prefetch} + 2", settings.device_batches, memory.device_bytes)
    yield table
    if memory.host_bytes_as_read:
        yield '"as read": leaves that the host casts, cuts or transforms, before it does so.'
    if options.steps_per_call > 1:
        yield f"Each call delivers {options.steps_per_call} batches, which is counted here."
    if options.tunable:
        yield f'At the start: {" and ".join(sorted(options.tunable))} "auto" may grow, within feedline.Limits.'
    if settings.workers:
        batches, each = settings.shared_batches, in_bytes(memory.shared_bytes // settings.shared_batches)
        yield f"/dev/shm, for {counted(settings.workers, 'worker')}: {batches} × {each}, at most."


def _epochs(plan: Plan) -> Iterator[RenderableType]:
    """Which batch sizes fit, and for those near the given one the steps of an epoch and the rows that are left."""
    rows, size, multiple, whole = plan.rows, plan.batch_size, plan.multiple_of, plan.whole_sizes()
    shards = f"the {counted(plan.shards, 'shard')} of the batch axis"
    if multiple == 1:
        yield "Every batch size fits, since the batch axis is one shard."
    elif multiple == plan.shards:
        yield f"Batch sizes that fit are multiples of {shards}."
    else:
        yield f"Batch sizes that fit are multiples of {multiple}: of {shards} and of the {plan.lanes} lanes."
    if rows is None or whole is None:
        yield f"The next ones are {' and '.join(f'{other:,}' for other in plan.next_sizes())}."
        endless = "The dataset repeats without end, so that its only epoch has no end."
        stream = "The steps of an epoch, and the rows that are left, are known only at the end of the stream."
        yield stream if plan.lanes else endless
        return
    largest = [rows // multiple * multiple] if multiple <= rows < size else []
    table = Table(box=SIMPLE)
    for column in ("batch size", '"drop": steps', "left out", '"pad": steps', "padded"):
        table.add_column(column, justify="right")
    for other in sorted({size, *plan.next_sizes(), *whole, *largest}):
        name = f"→ {other:,}" if other == size else f"{other:,}"
        style = "red" if other % multiple else "bold" if other == size else None
        table.add_row(name, *(f"{number:,}" for number in Epoch.of(rows, other)[1:]), style=style)
    yield table
    if size % multiple:
        yield f"→ {size:,} does not fit; the others do."
    if not whole:
        yield f"No size near {size:,} that fits divides the {rows:,} rows."
    yield f'"wrap" continues into the next epoch: {rows / size:,.5g} batches an epoch.'


# --- JSON ---


def as_object(source: str, target: Target) -> dict[str, Any]:
    """What --json prints. docs/inspect.md names the keys. Spans are [first, after the last]."""
    plan, first, leaves = target.plan, target.first, _row_leaves(target.plan)
    return {
        "source": source,
        "fits": not plan.problems,
        "problems": plan.problems,
        "rows": plan.rows,
        "lanes": plan.lanes,
        "row_bytes": sum(leaf.bytes for leaf in leaves),
        "leaves": [_form(leaf.name, leaf) for leaf in leaves],
        "first_rows": [
            {leaf_title(leaf.name): shown(values[row]) for leaf, values in zip(leaves, first, strict=True)}
            for row in range(len(first[0]))
        ],
        "mesh": dict(target.mesh.shape),
        "processes": plan.processes,
        "batch_size": plan.batch_size,
        "described_batch_size": plan.fitting_size,
        "batch": [{**_form(name, leaf), "spec": in_words(leaf.sharding)} for name, leaf in plan.leaves.items()],
        "reads": _reads(plan),
        "devices": _devices(plan),
        "ahead": plan.settings.buffer,
        "prefetch": plan.settings.prefetch,
        "memory": plan.memory._asdict(),
        "remainder": plan.remainder,
        "multiple_of": plan.multiple_of,
        "next_sizes": plan.next_sizes(),
        "epoch": None if plan.epoch is None else plan.epoch._asdict(),
        "sizes_that_leave_out_none": plan.whole_sizes(),
    }


def _form(name: str, leaf: Any) -> dict[str, Any]:
    return {"leaf": leaf_title(name), "dtype": leaf.dtype.name, "shape": list(leaf.shape)}


def _reads(plan: Plan) -> list[dict[str, Any]]:
    """What each process supplies."""
    return [
        {
            "process": reads.process,
            "devices": reads.devices,
            "rows": spans(reads.rows),
            **({"lanes": reads.lanes} if plan.lanes else {}),
            "local_bytes": reads.local_bytes,
            "read_bytes": reads.read_bytes,
            "leaves": {
                leaf_title(name): {
                    "rows": spans(leaf.rows),
                    "columns": [spans(axis) for axis in leaf.column_indices],
                }
                for name, leaf in reads.leaves.items()
            },
        }
        for reads in plan.reads
    ]


def _devices(plan: Plan) -> list[dict[str, Any]]:
    """What each device holds."""
    holds: dict[int, dict[str, Any]] = {}
    for name, leaf in plan.leaves.items():
        for device, (rows, *columns) in held(leaf).items():
            holds.setdefault(device, {})[leaf_title(name)] = {"rows": rows, "columns": columns}
    return [
        {"device": device, "process": reads.process, "leaves": holds[device]}
        for reads in plan.reads
        for device in reads.devices
        if device in holds
    ]


# --- words ---


def held(leaf: Any) -> dict[int, list[Span]]:
    """For each device the range that it holds of each axis of a leaf, as [first, after the last]."""
    return {
        device: [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
        for device, index in device_parts(leaf.sharding, leaf.shape).items()
    }


def spans(indices: Sequence[int] | npt.NDArray[np.int64]) -> list[Span]:
    """Ascending indices as spans of adjacent ones.

    Example:
      >>> spans([0, 1, 2, 6, 7])
      [(0, 3), (6, 8)]
    """
    found = np.asarray(indices, np.int64)
    ends = np.flatnonzero(np.diff(found) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(found, ends) if len(run)]


def in_spans(found: Sequence[Span], letter: str = "") -> str:
    """Spans as numbers with a letter in front; the end of a span belongs to it.

    Example:
      >>> in_spans([(0, 16), (32, 33)]), in_spans(spans(range(0, 20, 2)), "d")
      ('0–15, 32', 'd0, d2, d4, … d18')
    """
    texts = [f"{letter}{start:,}" + (f"–{stop - 1:,}" if stop > start + 1 else "") for start, stop in found]
    return ", ".join(texts if len(texts) <= _MAX_SPANS + 1 else [*texts[:_MAX_SPANS], f"… {texts[-1]}"])


def leaf_title(name: str) -> str:
    """A leaf's name without quotes and brackets.

    Example:
      >>> leaf_title("batch['image']"), leaf_title("batch['a'][0]"), leaf_title("batch")
      ('image', 'a.0', 'batch')
    """
    parts = name.removeprefix("batch").replace("[", "").replace("'", "").split("]")
    return ".".join(part for part in parts if part) or "batch"


def in_words(sharding: jax.sharding.Sharding) -> str:
    """The PartitionSpec of a sharding, as it is written with `P`; the kind of any other sharding."""
    spec: Any = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else f"P({', '.join(map(repr, spec))})"


def shown(values: Array) -> str:
    """The values of one leaf of one row in a few characters: the values if they are few, else their range.

    Example:
      >>> shown(np.array([0.5, 1.25])), shown(np.arange(64, dtype=np.uint8).reshape(8, 8))
      ('[0.5, 1.25]', '0 to 63')
    """
    if values.ndim == 0:
        return _number(values)
    if values.size == 0:
        return "no values"
    if values.ndim == 1 and values.size <= 4:
        return f"[{', '.join(_number(value) for value in values)}]"
    if values.dtype.kind == "b":
        return f"{int(np.count_nonzero(values)):,} of {values.size:,} True"
    values = np.abs(values) if values.dtype.kind == "c" else values  # magnitudes
    numbers = values if values.dtype.kind in "iu" else values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    others = values.size - finite.size
    least, greatest = (_number(finite.min()), _number(finite.max())) if finite.size else ("", "")
    found = [] if not finite.size else [f"all {least}"] if least == greatest else [f"{least} to {greatest}"]
    return ", ".join([*found, *([f"{others:,} not finite"] if others else [])])


def _number(value: Any) -> str:
    kind = np.asarray(value).dtype.kind
    if kind in "iub":
        return str(value)
    return f"{complex(value):.4g}" if kind == "c" else f"{float(value):.4g}"
