"""Prints what a source holds, and the plan of a feed of this source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from feedline._src.feed_options import FeedOptions
from feedline._src.listen.words import counted
from feedline._src.plan.plan import Epoch, Plan
from feedline._src.plan.shardings import device_parts
from feedline._src.rows.spec import Array, Leaf, RowSpec
from feedline._src.tools.cli.terminal import in_bytes
from feedline._src.tools.inspect.target import Target

Span = tuple[int, int]
"""Adjacent indices: the first, and the one after the last."""
_MAX_LINES, _MAX_SPANS = 12, 3


def show(source: str, target: Target, console: Console) -> None:
    """Print the description of a target."""
    for part in _parts(source, target):
        console.print(part, markup=False, highlight=False)


def _parts(source: str, target: Target) -> Iterator[RenderableType]:
    plan, size = target.plan, f"{target.plan.fitting_size:,}"
    for problem in plan.problems:
        yield Text(f"A feed refuses this: {problem}", "red")
    yield Text(f"{source}: {_amount(plan)}", "bold")
    names = [f"{'item' if plan.lanes else 'row'} {row}" for row in range(len(target.first[0]))]
    rows = [
        [leaf_title(leaf.name), _shape(leaf.shape), leaf.dtype.name, f"{leaf.bytes:,}", *map(shown, values)]
        for leaf, values in zip(_row_leaves(plan), target.first, strict=True)
    ]
    yield from _table(["leaf", "shape", "dtype", "bytes", *names], rows)
    asked = "" if plan.fitting_size == plan.batch_size else f", since one of {plan.batch_size:,} does not fit"
    yield Text(f"A batch of {size}{asked}", "bold")
    title = "leaf" if target.options.transform is None else "leaf, transformed"
    rows = [
        [leaf_title(name), _shape(leaf.shape), leaf.dtype.name, _in_words(leaf.sharding), _shard(leaf)]
        for name, leaf in plan.leaves.items()
    ]
    yield from _table([title, "shape", "dtype", "sharding", "on each device"], rows)
    yield from _where(target.mesh.shape, plan)
    yield from _table(
        ["process", "devices", "reads rows", *(["lanes"] if plan.lanes else []), "bytes a batch"],
        [
            [
                str(reads.process),
                *map(in_spans, (reads.devices, reads.rows, *([reads.lanes] if plan.lanes else []))),
                in_bytes(reads.local_bytes),
            ]
            for reads in plan.reads
        ],
    )
    if any(reads.cuts for reads in plan.reads):
        yield "Each process reads whole rows, and cuts the columns for its devices afterwards.\n"
    yield Text(f"Memory for batches of {size} rows", "bold")
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
    return f"{kind}, items of {in_bytes(size)}. Their number is known only once all are read."


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "one value"


def _shard(leaf: jax.ShapeDtypeStruct) -> str:
    return _shape(leaf.sharding.shard_shape(leaf.shape)) if leaf.sharding is not None else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[RenderableType]:
    """A table, cut to its first lines."""
    table = Table(*columns, box=SIMPLE)
    for cells in rows[:_MAX_LINES]:
        table.add_row(*map(Text, cells))  # plain strings would be parsed as markup
    yield table
    if len(rows) > _MAX_LINES:
        yield f"  and {len(rows) - _MAX_LINES} more\n"


def _where(mesh: Mapping[str, int], plan: Plan) -> Iterator[RenderableType]:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.items())
    devices = math.prod(mesh.values())
    each = f", {devices // plan.processes} in each" if plan.processes > 1 else ""
    yield f"Mesh {axes}: {counted(devices, 'device')} in {counted(plan.processes, 'process')}{each}."
    used = {device for leaf in plan.leaves.values() for device in _held(leaf)}
    if len(used) < devices:
        yield f"The feed uses {len(used)} of them. A process without any of these cannot build the feed."


def _memory(options: FeedOptions, plan: Plan) -> Iterator[RenderableType]:
    """The formulas of memory with their numbers."""
    memory, settings = plan.memory, plan.settings
    ahead, prefetch = f"{'window' if plan.lanes else 'buffer'} {settings.buffer}", f"prefetch {settings.prefetch}"
    host, on_cpu_devices = settings.host_batches, settings.host_batches_on_cpu_devices
    table = Table.grid(padding=(0, 2, 0, 0))
    for what, factor, count, total in (
        ("host, each process", f"{ahead} + 1", host, memory.host_bytes),
        ("  on CPU devices", f"{ahead} + {prefetch} + 3", on_cpu_devices, memory.host_bytes_on_cpu_devices),
        ("  plus, as read", f"{ahead} + 1", host, memory.host_bytes_as_read),
        ("device, each", f"{prefetch} + 2", settings.device_batches, memory.device_bytes),
    ):
        if total:
            table.add_row(what, f"({factor}) × {in_bytes(total // count)} = {in_bytes(total)}")
    yield table
    if memory.host_bytes_as_read:
        yield '"as read": leaves before the host casts, cuts or transforms them.'
    if options.steps_per_call > 1:
        yield f"Each call delivers {options.steps_per_call} batches, which these figures include."
    if options.tunable:
        yield f'The memory grows if "auto" raises {" and ".join(sorted(options.tunable))}, within feedline.Limits.'
    if settings.workers:
        batches, each = settings.shared_batches, in_bytes(memory.shared_bytes // settings.shared_batches)
        yield f"Batches on the way from {counted(settings.workers, 'worker')}: {batches} × {each} at most."


def _epochs(plan: Plan) -> Iterator[RenderableType]:
    """Which batch sizes fit; for sizes near the given one, the steps of an epoch and rows left out or padded."""
    rows, size, multiple = plan.rows, plan.batch_size, plan.multiple_of
    lanes = f" and the source {plan.lanes} lanes" if multiple != plan.shards else ""
    yield (
        f"Batch sizes must be multiples of {multiple}: the batch axis has {counted(plan.shards, 'shard')}{lanes}."
    )
    if rows is None:
        yield f"The nearest are {' and '.join(f'{other:,}' for other in plan.next_sizes())}."
        yield "The steps of an epoch are known only at its end, if it has one."
        return
    largest = [rows // multiple * multiple] if multiple <= rows < size else []
    table = Table(box=SIMPLE)
    for column in ("batch size", '"drop": steps', "left out", '"pad": steps', "padded"):
        table.add_column(column, justify="right")
    for other in sorted({size, *plan.next_sizes(), *largest}):
        name = f"→ {other:,}" if other == size else f"{other:,}"
        style = "red" if other % multiple else "bold" if other == size else None
        table.add_row(name, *(f"{number:,}" for number in Epoch.of(rows, other)[1:]), style=style)
    yield table
    yield f'"wrap" continues into the next epoch: {rows / size:,.5g} batches an epoch.'


def _held(leaf: Any) -> dict[int, list[Span]]:
    """{device: the span that it holds along each axis of a leaf}."""
    return {device: list(part) for device, part in device_parts(leaf.sharding, leaf.shape).items()}


def _spans(indices: Any) -> list[Span]:
    """Ascending indices as spans of adjacent ones."""
    found = np.asarray(indices, np.int64)
    ends = np.flatnonzero(np.diff(found) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(found, ends) if len(run)]


def in_spans(indices: Any) -> str:
    """A few spans of indices, as text; both ends of a span are included.

    Example:
      >>> in_spans([0, 1, 2, 7]), in_spans(range(0, 20, 2))
      ('0–2, 7', '0, 2, 4, … 18')
    """
    found = [f"{start:,}" + (f"–{stop - 1:,}" if stop > start + 1 else "") for start, stop in _spans(indices)]
    return ", ".join(found if len(found) <= _MAX_SPANS + 1 else [*found[:_MAX_SPANS], f"… {found[-1]}"])


def leaf_title(name: str) -> str:
    """A leaf's name without quotes and brackets.

    Example:
      >>> leaf_title("batch['image']"), leaf_title("batch['a'][0]"), leaf_title("batch")
      ('image', 'a.0', 'batch')
    """
    return re.sub(r"[\[\]']+", ".", name.removeprefix("batch")).strip(".") or "batch"


def _in_words(sharding: jax.sharding.Sharding) -> str:
    """The PartitionSpec of a sharding, as written with `P`; without one, the type of the sharding."""
    spec: Any = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else f"P({', '.join(map(repr, spec))})"


def shown(values: Array) -> str:
    """The values of one leaf of one row in a few characters: the values if they are few, else their range."""
    if values.ndim == 0:
        return _number(values)
    if values.size == 0:
        return "no values"
    if values.ndim == 1 and values.size <= 4:
        return f"[{', '.join(map(_number, values))}]"
    values = np.abs(values) if values.dtype.kind == "c" else values  # complex numbers: by their magnitudes
    numbers = values if values.dtype.kind in "iub" else values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    others = [f"{values.size - finite.size:,} not finite"] if finite.size < values.size else []
    if not finite.size:
        return others[0]
    least, greatest = _number(finite.min()), _number(finite.max())
    return ", ".join([f"all {least}" if least == greatest else f"{least} to {greatest}", *others])


def _number(value: Any) -> str:
    kind = np.asarray(value).dtype.kind
    if kind in "iub":
        return str(value)
    return f"{complex(value):.4g}" if kind == "c" else f"{float(value):.4g}"
