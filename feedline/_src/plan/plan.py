"""`Plan`: what a feed will read and place, and what that needs, computed without building it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from feedline._src.options import Settings, checked_integer
from feedline._src.order.schedule import ENDLESS, Remainder, Schedule
from feedline._src.placement.place import broadcast, check_not_split, check_shardings, with_steps
from feedline._src.placement.plan import (
    Indices,
    LeafPlan,
    check_rank,
    device_owners,
    device_parts,
    leaf_part,
    shards_of,
    union_of_rows,
)
from feedline._src.plan.asked import (
    Asked,
    SourceMetadata,
    batch_of_rows,
    is_cut,
    placed_rows,
    reads_by_leaf,
    refused_options,
    with_own_leaves,
)
from feedline._src.plan.sizes import (
    Epoch,
    Memory,
    fitting_size,
    next_sizes,
    refused_auto_prefetch,
    refused_rows,
    refused_size,
    stream_window,
    whole_sizes,
)
from feedline._src.rows.spec import RowSpec

Processes = Mapping[int, Collection[int]]
"""{process: the ids of its devices}."""
_Leaves = Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessReads:
    """What one process reads and places of each global batch.

    Attributes:
      process: its index.
      devices: the ids of its devices, ascending.
      rows: int64[k], ascending: the rows of the batch of which it reads anything.
      lanes: of a stream, the lanes that it reads.
      leaves: {name: its part of that leaf}, with `rows`, `columns` for each further axis, and `local_shape`.
      by_leaf: whether it reads of each leaf only its own rows and columns, or `rows` with all columns.
      cuts: whether it reads columns or rows that it does not place.
      local_bytes: of its part of a batch, as it is placed.
      read_bytes: of the leaves that are cast, cut or transformed on the host, as they are read before.
    """

    process: int
    devices: tuple[int, ...]
    rows: Indices
    lanes: tuple[int, ...]
    leaves: Mapping[str, LeafPlan]
    by_leaf: bool
    cuts: bool
    local_bytes: int
    read_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a feed will read and place, and what that needs: `feedline.FeedOptions.plan` makes one.

    It is a value: no rows are read for it, and no threads are started. Bytes are computed from shapes and dtypes;
    what the model, the source's caches and JAX itself take comes in addition.

    Attributes:
      rows: of an epoch. None: unknown before the end of a stream, or endless.
      lanes: of a stream; 0: rows with random access.
      row_spec: tree of `jax.ShapeDtypeStruct` of one row, in the dtypes of the source.
      spec: tree of `jax.ShapeDtypeStruct` with shardings, of what `next(feed)` returns. It is for batches of
        `fitting_size` rows, as are `leaves`, `reads` and `memory`.
      leaves: {name: `jax.ShapeDtypeStruct` with its sharding} of one global batch, in the order in which JAX
        flattens it. Names are those of error messages: "batch['image']".
      batch_size: rows in the global batch that is asked for; the first of sizes that change.
      fitting_size: the batch size if it fits, else the next smaller one that does, else the smallest.
      multiple_of: batch sizes that fit are multiples of this: of `shards` and `lanes`.
      shards: of the batch axis.
      problems: why a feed refuses these options, each with a change that works. Empty: it accepts them, unless
        rows cannot be read or the machine lacks something.
      processes: the number of processes among which the devices are divided.
      reads: of each process that owns a device of the sharding, or of the one that was asked for.
      remainder: as in the options.
      epoch: an epoch in batches of `batch_size`: `steps` and rows `left_out` with remainder "drop", `padded_steps`
        and `padding` rows with "pad". None where `rows` is.
      length: batches that a pass delivers, as `len(feed)` says; with several steps per call, calls. None: endless,
        unknown, or refused.
      settings: `buffer`, `prefetch` and `workers` to begin with, where "auto" stands for the defaults. Of a stream
        `buffer` is the window in which processes agree on its end. `threads` are 0 unless they are given, since
        their default depends on the machine.
      memory: bytes: `host_bytes`, `host_bytes_on_cpu_devices` in place of it where the devices are CPUs,
        `host_bytes_as_read` and `shared_bytes` (/dev/shm) in addition, of the process that needs most; and
        `device_bytes` of one device.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
      >>> from feedline import FeedOptions
      >>> mesh = AbstractMesh((8,), ("data",))  # no such devices are needed
      >>> rows = {"x": np.zeros((1000, 3), np.float32)}
      >>> options = FeedOptions(rows, batch_size=64, sharding=NamedSharding(mesh, PartitionSpec("data")))
      >>> plan = options.plan(processes=4)
      >>> plan
      <Plan: 64 rows a batch, 4 processes, 576 bytes a process, 384 bytes a device, no problems>
      >>> plan.reads[1].rows[[0, -1]].tolist(), plan.reads[1].local_bytes
      ([16, 31], 192)
      >>> plan.epoch.steps, plan.epoch.left_out, plan.multiple_of
      (15, 40, 8)
      >>> plan.memory.host_bytes == 3 * 192, plan.memory.device_bytes == 4 * 96  # by the formulas
      (True, True)
    """

    rows: int | None
    lanes: int
    row_spec: Any
    spec: Any
    leaves: Mapping[str, jax.ShapeDtypeStruct]
    batch_size: int
    fitting_size: int
    multiple_of: int
    shards: int
    problems: tuple[str, ...]
    processes: int
    reads: tuple[ProcessReads, ...]
    remainder: Remainder
    epoch: Epoch | None
    length: int | None
    settings: Settings
    memory: Memory

    def __repr__(self) -> str:
        return (
            f"<Plan: {self.batch_size:,} rows a batch, {self.processes:,} processes, "
            f"{self.memory.host_bytes:,} bytes a process, {self.memory.device_bytes:,} bytes a device, "
            f"{f'refused: {self.problems[0]}' if self.problems else 'no problems'}>"
        )

    def next_sizes(self) -> list[int]:
        """The next smaller and the next larger batch size that fits the sharding and the lanes."""
        return next_sizes(self.batch_size, self.multiple_of)

    def whole_sizes(self) -> list[int] | None:
        """Up to four batch sizes near `batch_size` that fit, and divide `rows`. None where `rows` is."""
        return None if self.rows is None else whole_sizes(self.rows, self.batch_size, self.multiple_of)


def plan_of(
    source: SourceMetadata, out: RowSpec, asked: Asked, processes: Processes, process: int | None = None
) -> Plan:
    """The plan of a feed.

    Args:
      source: what is known of the source.
      out: the spec of a row after the transform; without one that of the source.
      asked: the options.
      processes: the devices of each process.
      process: None: of all processes.

    Raises:
      ValueError, TypeError: the sharding cannot divide the leaves, whatever the batch size; or `process` has no
        device of it.
    """
    multiple, shards = multiple_of(out, asked.sharding, source.lanes)
    size = fitting_size(asked.first_batch_size, multiple)
    problems = list(_problems(source, asked, multiple, shards))
    batch = batch_of_rows(out, size, asked.sharding)
    of_rows = _by_name(batch)
    for i in source.ragged:
        name = list(of_rows)[i]
        check_not_split(of_rows[name], name)
    try:
        batch = with_own_leaves(batch, size, asked)
    except ValueError as error:
        problems.append(str(error))
    batches = _Batches(source, out, asked, of_rows, _by_name(batch))
    owners = {index: devices for index, devices in processes.items() if batches.has_any(devices)}
    if process is not None and process not in owners:
        raise ValueError(
            f"a plan is for a process that owns a device of the sharding, and process {process} owns none; "
            f"process={next(iter(owners))} does"
        )
    reads = [batches.reads_of(index, owners[index]) for index in (owners if process is None else [process])]
    settings = asked.first_settings(default_threads=0)
    if source.lanes:
        everywhere = len({batches.lanes(devices) for devices in owners.values()}) == 1
        problems += refused_auto_prefetch(asked, read_everywhere=everywhere)
        settings = settings._replace(buffer=stream_window(settings.prefetch, read_everywhere=everywhere))
    return Plan(
        rows=source.rows,
        lanes=source.lanes,
        row_spec=source.spec.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in source.spec.leaves]),
        spec=with_steps(batch, asked.steps_per_call),
        leaves=batches.leaves,
        batch_size=asked.first_batch_size,
        fitting_size=size,
        multiple_of=multiple,
        shards=shards,
        problems=tuple(problems),
        processes=len(processes),
        reads=tuple(reads),
        remainder=asked.remainder,
        epoch=None if source.rows is None else Epoch.of(source.rows, asked.first_batch_size),
        length=None if problems else _length(source.rows, asked),
        settings=settings,
        memory=_memory(batches.leaves, reads, asked.steps_per_call, settings),
    )


def multiple_of(out: RowSpec, sharding: Any, lanes: int = 0) -> tuple[int, int]:
    """What every batch size is a multiple of, and the number of shards of the batch axis.

    Args:
      out: the spec of a row after the transform.
      sharding: of the batch, or a tree of shardings.
      lanes: of a stream.

    Raises:
      ValueError, TypeError: the sharding does not fit these leaves, whatever the batch size.
    """
    rows, shards = placed_rows(out), 1
    shardings = jax.tree.leaves(broadcast(sharding, rows))
    for leaf, place in zip(out.leaves, shardings, strict=True):
        check_rank(place, (1, *leaf.shape), leaf.name)
        shards = math.lcm(shards, shards_of(place, 1 + len(leaf.shape))[0])
    return math.lcm(shards, max(1, lanes)), shards


def devices_by_process(sharding: Any, processes: int | None) -> dict[int, list[int]]:
    """The ids of the devices of a sharding, or of a tree of them, by process.

    Args:
      processes: None: the processes that own the devices. Else that many, among which the devices are divided
        evenly in the order of `jax.devices()`.

    Raises:
      ValueError: that many processes do not divide the devices. The message names numbers that do.
    """
    check_shardings(sharding)
    found = {id_: process for leaf in jax.tree.leaves(sharding) for id_, process in device_owners(leaf).items()}
    ordered = sorted(found, key=lambda id_: (found[id_], id_))
    if processes is None:
        return {process: list(group) for process, group in itertools.groupby(ordered, found.__getitem__)}
    return divided(ordered, processes)


def divided(devices: Sequence[int], processes: int) -> dict[int, list[int]]:
    """Devices in equal parts, the first ones to process 0.

    Raises:
      ValueError: the number of processes does not divide them. The message names numbers that do.

    Example:
      >>> divided([0, 1, 2, 3], 2)
      {0: [0, 1], 1: [2, 3]}
    """
    checked_integer("processes", processes, at_least=1)
    count = len(devices)
    if count % processes:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        near = {max(n for n in divisors if n < processes), next((n for n in divisors if n > processes), count)}
        raise ValueError(
            f"processes must divide the {count} devices of the mesh into equal parts, got {processes}; "
            f"{' or '.join(map(str, sorted(near)))} would work"
        )
    each = count // processes
    return {process: list(devices[process * each : (process + 1) * each]) for process in range(processes)}


class _Batches:
    """Global batches of one size, and what some devices hold of them.

    Attributes:
      leaves: {name: the leaf}, of all leaves.

    Args:
      of_rows: the leaves that rows give, without those that feedline adds.
      leaves: all leaves.
    """

    def __init__(
        self, source: SourceMetadata, out: RowSpec, asked: Asked, of_rows: Collection[str], leaves: _Leaves
    ) -> None:
        self.leaves = leaves
        self._source, self._out, self._asked, self._of_rows = source, out, asked, of_rows
        self._parts = {name: device_parts(leaf.sharding, leaf.shape) for name, leaf in leaves.items()}

    def has_any(self, devices: Collection[int]) -> bool:
        """Whether one of these devices holds a part of a leaf."""
        return any(not parts.keys().isdisjoint(devices) for parts in self._parts.values())

    def lanes(self, devices: Collection[int]) -> tuple[int, ...]:
        """The lanes of a stream of which these devices hold a row."""
        if not self._source.lanes:
            return ()
        rows = union_of_rows(list(self._plans(devices).values()))
        size = next(iter(self.leaves.values())).shape[0]
        return tuple(np.unique(rows * self._source.lanes // size).tolist())

    def _plans(self, devices: Collection[int]) -> dict[str, LeafPlan]:
        return {
            name: leaf_part(
                [parts[device] for device in devices if device in parts], self.leaves[name].shape, name
            )
            for name, parts in self._parts.items()
        }

    def reads_of(self, process: int, devices: Collection[int]) -> ProcessReads:
        """What a process with these devices reads and places."""
        plans, row = self._plans(devices), self._source.spec.leaves
        of_rows = [plans[name] for name in self._of_rows]
        rows, bad_rows = union_of_rows(of_rows), self._asked.reading.bad_rows
        reads_columns, transformed = self._source.reads_columns, self._asked.transform is not None
        by_leaf = reads_by_leaf(
            of_rows, rows, reads_columns=reads_columns, transformed=transformed, bad_rows=bad_rows
        )
        placed = [
            (plan.local_shape, leaf.placed_dtype) for plan, leaf in zip(of_rows, self._out.leaves, strict=True)
        ]
        shapes = [shape for shape, _ in placed] if by_leaf else [(len(rows), *leaf.shape) for leaf in row]
        read = [(shape, leaf.dtype) for shape, leaf in zip(shapes, row, strict=True)]
        # without a transform, a leaf that needs no change is read into the memory from which it is placed
        before = read if transformed else [form for form, after in zip(read, placed, strict=True) if form != after]
        own = [(plan.local_shape, self.leaves[name].dtype) for name, plan in plans.items()]
        return ProcessReads(
            process=process,
            devices=tuple(sorted(devices)),
            rows=rows,
            lanes=self.lanes(devices),
            leaves=plans,
            by_leaf=by_leaf,
            cuts=is_cut(of_rows, rows) and not by_leaf,
            local_bytes=_bytes(own),
            read_bytes=_bytes(before),
        )


def _bytes(arrays: Iterable[tuple[tuple[int, ...], np.dtype[Any]]]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)


def _by_name(batch: Any) -> _Leaves:
    paths = jax.tree_util.tree_leaves_with_path(batch)
    return {f"batch{jax.tree_util.keystr(path)}": leaf for path, leaf in paths}


def _problems(source: SourceMetadata, asked: Asked, multiple: int, shards: int) -> Iterator[str]:
    yield from refused_options(asked, source)
    changing = [asked.batch_size] if isinstance(asked.batch_size, int) else [size for _, size in asked.batch_size]
    for size in dict.fromkeys(changing):
        yield from refused_size(size, multiple, shards, source.lanes)
        if source.rows is not None:
            yield from refused_rows(source.rows, size, multiple, asked)


def _length(rows: int | None, asked: Asked) -> int | None:
    if rows is None or not isinstance(asked.batch_size, int):
        return None
    batches = Schedule(rows, asked.batch_size, asked.remainder, asked.epochs).batches_of_pass(0)
    return None if batches == ENDLESS else batches // asked.steps_per_call


def _memory(leaves: _Leaves, reads: Sequence[ProcessReads], steps: int, settings: Settings) -> Memory:
    shards = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves.values()]
    return Memory.of(
        steps * max(each.local_bytes for each in reads),
        steps * max(each.read_bytes for each in reads),
        steps * _bytes(shards),
        settings,
    )
