"""Prints the part of a description that is arithmetic: memory, epochs, and batch sizes that fit."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table

from feedline._src.pipeline.settings import first_settings, tunable_settings
from feedline._src.tools.inspect.description import Description
from feedline._src.tools.inspect.sizes import Epoch, next_sizes, whole_sizes
from feedline._src.tools.inspect.words import in_bytes, plural


def memory(description: Description) -> Iterator[RenderableType]:
    """The formulas with their numbers."""
    found, options = description.memory, description.options
    settings = first_settings(options)
    n, prefetch = description.ahead, settings.prefetch
    ahead = f"{'window' if description.contents.lanes else 'buffer'} {n}"
    table = Table.grid(padding=(0, 2, 0, 0))

    def add(what: str, factor: str, count: int, total: int) -> None:
        table.add_row(what, f"({factor}) × {in_bytes(total // count)} = {in_bytes(total)}")

    add("host, each process", f"{ahead} + 1", n + 1, found.host_bytes)
    add(
        "  on CPU devices", f"{ahead} + prefetch {prefetch} + 3", n + prefetch + 3, found.host_bytes_on_cpu_devices
    )
    if found.host_bytes_as_read:
        add("  more, as read", f"{ahead} + 1", n + 1, found.host_bytes_as_read)
    add("device, each", f"prefetch {prefetch} + 2", prefetch + 2, found.device_bytes)
    yield table
    if found.host_bytes_as_read:
        yield '"as read": leaves that the host casts, cuts or transforms, before it does so.'
    if options.steps_per_call > 1:
        yield f"Each call delivers {options.steps_per_call} batches, which is counted here."
    if tunable_settings(options):
        names = " and ".join(sorted(tunable_settings(options)))
        yield f'At the start: {names} "auto" may grow, within feedline.Limits.'
    if settings.workers:
        batches = settings.workers * (2 * max(1, settings.buffer // settings.workers) + 3)
        size = found.host_bytes // (n + 1)
        yield f"/dev/shm, for {plural(settings.workers, 'worker')}: {batches} × {in_bytes(size)}, at most."


def epochs(description: Description) -> Iterator[RenderableType]:
    """Which batch sizes fit, and for those near the given one the steps of an epoch and the rows that are left."""
    rows, size, multiple = description.contents.rows, description.options.first_batch_size, description.multiple
    shards = f"the {plural(description.shards, 'shard')} of the batch axis"
    if multiple == 1:
        yield "Every batch size fits, since the batch axis is one shard."
    elif multiple == description.shards:
        yield f"Batch sizes that fit are multiples of {shards}."
    else:
        lanes = f"the {description.contents.lanes} lanes"
        yield f"Batch sizes that fit are multiples of {multiple}: of {shards} and of {lanes}."
    if rows is None:
        yield f"The next ones are {' and '.join(f'{other:,}' for other in next_sizes(size, multiple))}."
        endless = "The dataset repeats without end, so that its only epoch has no end."
        stream = "The steps of an epoch, and the rows that are left, are known only at the end of the stream."
        yield stream if description.contents.lanes else endless
        return
    whole = whole_sizes(rows, size, multiple)
    largest = [rows // multiple * multiple] if multiple <= rows < size else []
    table = Table(box=SIMPLE)
    for column in ("batch size", '"drop": steps', "left out", '"pad": steps', "padded"):
        table.add_column(column, justify="right")
    for other in sorted({size, *next_sizes(size, multiple), *whole, *largest}):
        name = f"→ {other:,}" if other == size else f"{other:,}"
        style = "red" if other % multiple else "bold" if other == size else None
        table.add_row(name, *(f"{number:,}" for number in Epoch.of(rows, other)[1:]), style=style)
    yield table
    if size % multiple:
        yield f"→ {size:,} does not fit; the others do."
    if not whole:
        yield f"No size near {size:,} that fits divides the {rows:,} rows."
    yield f'"wrap" continues into the next epoch, and leaves out no row: {rows / size:,.5g} batches an epoch.'
