"""`Plan`: what a feed will read and place, and how much memory it needs, computed without building the feed.

These kinds of index occur in feedline; this module uses all but the last two:

- a *row index* numbers the rows of the source;
- a *position* numbers the rows of one epoch, in the epoch's order;
- an *offset* numbers the rows of one global batch: `ProcessReads.rows` and `LeafPlan.rows` are offsets;
- a *local row* numbers the rows of a process-local batch;
- a *column* is an index along axis 1 or a later axis of a leaf;
- a *lane* numbers one of several streams;
- leaves are numbered as JAX flattens the batch, with or without `valid` and `place`, which feedline adds;
- a *step* counts delivered batches over all resumes; a *number* counts deliveries from a pipeline's start;
- a *part* of a delivery is what one thread reads in one call; parts are numbered within the delivery.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from feedline._src.options import Settings, checked_integer
from feedline._src.order.schedule import ENDLESS, Cursor, Remainder, Schedule
from feedline._src.plan.asked import (
    CheckedOptions,
    SourceMetadata,
    next_sizes,
    refused,
    refused_layout,
    refused_sizes,
    with_own_leaves,
)
from feedline._src.plan.shardings import (
    Columns,
    Indices,
    LeafPlan,
    broadcast,
    check_rank,
    device_owners,
    device_parts,
    layout,
    leaf_plan,
    sharded_spec,
    shards_of,
    union_of_rows,
    with_steps,
)
from feedline._src.rows.spec import RowSpec

Form = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of an array."""
Cuts = list[tuple[int, Columns]]
"""For some leaves: (number of the leaf, its columns to read)."""


class Epoch(NamedTuple):
    """An epoch, divided into batches of one size.

    Attributes:
      batch_size: rows in the global batch.
      steps: the number of full batches, which is the number of steps with remainder "drop".
      left_out: rows that "drop" leaves out.
      padded_steps: the number of steps with remainder "pad".
      padding: rows that "pad" repeats in the last batch.
    """

    batch_size: int
    steps: int
    left_out: int
    padded_steps: int
    padding: int

    @classmethod
    def of(cls, rows: int, batch_size: int) -> Epoch:
        """Divide `rows` rows into batches."""
        steps, left_out = divmod(rows, batch_size)
        return cls(batch_size, steps, left_out, steps + (left_out > 0), -rows % batch_size)


class Memory(NamedTuple):
    """The memory of a feed in bytes, by the formulas in docs/feed.md, "Sizes".

    Attributes:
      host_bytes: host memory of a process that places batches on accelerators.
      host_bytes_on_cpu_devices: host memory, including placed batches, of a process that places on CPU devices.
      host_bytes_as_read: additional host memory of a process, for leaves that are cast, cut or transformed.
      shared_bytes: maximum additional host memory of a process, for batches in flight from workers.
      device_bytes: memory of a device.
    """

    host_bytes: int
    host_bytes_on_cpu_devices: int
    host_bytes_as_read: int
    shared_bytes: int
    device_bytes: int

    @classmethod
    def of(cls, local_bytes: int, read_bytes: int, shard_bytes: int, settings: Settings) -> Memory:
        """Apply the formulas to the bytes of one delivery."""
        return cls(
            settings.host_batches * local_bytes,
            settings.host_batches_on_cpu_devices * local_bytes,
            settings.host_batches * read_bytes,
            settings.shared_batches * local_bytes,
            settings.device_batches * shard_bytes,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ProcessReads:
    """What one process reads and places of each global batch.

    Attributes:
      process: the process index.
      devices: the ids of the process's devices, ascending.
      rows: int64[k], ascending: the rows of the global batch that the process reads, in whole or in part.
      lanes: for a stream, the lanes that the process reads.
      leaves: {name of a leaf: the part of it that the process supplies}. A part has `rows`, `columns` for each
        further axis, and `local_shape`.
      of_rows: of `leaves`, those of a row after the transform.
      own: the names of the leaves that feedline adds.
      own_rows: the rows of each `own` leaf; None: there is none.
      by_leaf: whether the process reads of each leaf only what it places, rather than all columns of `rows`.
      calls: the reads for a batch: (ascending rows of the global batch, leaves and columns to read of them).
      cuts: whether the process reads columns or rows that it does not place.
      local_bytes: bytes of the process's part of a batch, as it is placed.
      as_read: shape and dtype of each leaf of the source, as it is read.
      changed: the indices in `as_read` of the leaves that are cast, cut or transformed on the host. These leaves
        are not placed from the memory into which they are read.
    """

    process: int
    devices: tuple[int, ...]
    rows: Indices
    lanes: tuple[int, ...]
    leaves: Mapping[str, LeafPlan]
    of_rows: tuple[LeafPlan, ...]
    own: frozenset[str]
    own_rows: Indices | None
    by_leaf: bool
    calls: tuple[tuple[Indices, Cuts], ...]
    cuts: bool
    local_bytes: int
    as_read: tuple[Form, ...]
    changed: tuple[int, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes of the leaves that are `changed`, as they are read."""
        return _bytes(self.as_read[leaf] for leaf in self.changed)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a feed will read and place, and how much memory it needs. `feedline.FeedOptions.plan` computes it.

    A plan starts no threads, and reads no rows, except one row if the source has no spec. Bytes are computed from
    shapes and dtypes, which have 64 bits only if x64 is enabled on the calling thread. They exclude the memory of
    the model, of the source's caches and of JAX itself.

    Attributes:
      rows: the number of rows in an epoch. None: an epoch has no end, or a stream's end is not known yet.
      lanes: the number of lanes of a stream; 0: rows with random access.
      row_spec: tree of `jax.ShapeDtypeStruct` of one row, in the dtypes of the source.
      spec: tree of `jax.ShapeDtypeStruct` with shardings, as for the result of `next(feed)`. `spec`, `leaves`,
        `reads` and `memory` are for batches of `fitting_size` rows.
      leaves: {name: `jax.ShapeDtypeStruct` with its sharding} of one global batch, in the order in which JAX
        flattens the batch. Names are as in error messages: "batch['image']".
      own: the names of the leaves that feedline adds, `valid` and `place`.
      batch_size: the batch size of the options. If it changes, the first; only `problems` concern all sizes.
      fitting_size: `batch_size` if it fits, else the next smaller size that fits, or else the smallest that fits.
      multiple_of: batch sizes that fit are multiples of this, the least common multiple of `shards` and `lanes`.
      shards: the number of shards of the batch axis.
      problems: the reasons why a feed refuses these options, each with a change that works. If empty, a feed
        accepts the options, unless rows cannot be read or the machine lacks resources.
      processes: the number of processes among which the devices are divided.
      reads: `ProcessReads` of each process that owns a device of the sharding, or only of the requested process.
      lane_owners: for each lane of a stream, the processes that read it, ascending. The first one saves the lane.
      remainder: as in the options.
      schedule: the batches of an epoch and of a pass; not for a stream.
      length: deliveries in a pass, as `len(feed)`: batches ÷ steps per call. None: the pass is endless, its end is
        unknown, the batch size changes, or a feed refuses the options.
      settings: `buffer`, `prefetch` and `workers` at the start; for "auto", the defaults. For a stream,
        `buffer` is the number of batches after which processes agree on the ends of lanes. `threads` is 0 unless
        it is given, since its default depends on the machine.
      compared: what must be equal in all processes besides the source: JSON values by field, as errors name them.
      memory: in bytes. For the process that needs most: `host_bytes` (`host_bytes_on_cpu_devices` if the devices
        are CPUs) + `host_bytes_as_read` + `shared_bytes` for workers. For each device: `device_bytes`.

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
    own: frozenset[str]
    batch_size: int
    fitting_size: int
    multiple_of: int
    shards: int
    problems: tuple[str, ...]
    processes: int
    reads: tuple[ProcessReads, ...]
    lane_owners: tuple[tuple[int, ...], ...]
    remainder: Remainder
    schedule: Schedule
    length: int | None
    settings: Settings
    compared: Mapping[str, Any]
    memory: Memory

    def __repr__(self) -> str:
        return (
            f"<Plan: {self.batch_size:,} rows a batch, {self.processes:,} processes, "
            f"{self.memory.host_bytes:,} bytes a process, {self.memory.device_bytes:,} bytes a device, "
            f"{f'refused: {self.problems[0]}' if self.problems else 'no problems'}>"
        )

    @property
    def epoch(self) -> Epoch | None:
        """An epoch in batches of `batch_size`; None if the number of rows is unknown."""
        return None if self.rows is None else Epoch.of(self.rows, self.batch_size)

    @property
    def agrees_on_ends(self) -> bool:
        """Whether processes read different lanes, so that they must exchange the ends of lanes."""
        return len(set(self.lane_owners)) > 1

    def next_sizes(self) -> list[int]:
        """The next smaller and the next larger batch size that fits the sharding and the lanes."""
        return next_sizes(self.batch_size, self.multiple_of)


def plan_of(
    source: SourceMetadata,
    out: RowSpec,
    options: CheckedOptions,
    processes: Mapping[int, Collection[int]],
    process: int | None = None,
    default_threads: int = 0,
) -> Plan:
    """The plan of a feed.

    Args:
      out: the spec of a row after the transform.
      processes: {process: ids of its devices}.
      process: the only process to plan for. None: all processes that own a device of the sharding.
      default_threads: the number of threads if none is given.
    """
    multiple, shards = multiple_of(out, options.sharding, source.lanes)
    given_size = options.sizes[0][1]
    size = max(multiple, given_size // multiple * multiple)
    problems = [*refused(options, source), *refused_sizes(options, source, multiple, shards)]
    batch = sharded_spec(placed_rows(out), size, options.sharding)
    of_rows = _by_name(batch)
    try:
        batch = with_own_leaves(batch, size, options)
    except (ValueError, TypeError) as error:
        problems.append(str(error))
    leaves = _by_name(batch)
    # each process needs the owners of all lanes
    some = processes if process is None or source.lanes else {process: processes.get(process, ())}
    reads = _reads_of(some, leaves, source, out, options)
    if process is not None and process not in reads:
        raise ValueError(
            f"process {process} owns no device of the sharding's mesh, so it can supply no rows. Build the mesh "
            "from devices of every process that runs the feed, or do not build the feed on that process"
        )
    settings = options.first_settings(default_threads)
    lane_owners: list[list[int]] = [[] for _ in range(source.lanes)]
    for owner in sorted(reads):
        for lane in reads[owner].lanes:
            lane_owners[lane].append(owner)
    apart = any(owners != lane_owners[0] for owners in lane_owners)
    problems += refused_layout(options, source, list(of_rows.values()), apart)
    if source.lanes:
        settings = settings._replace(threads=0, buffer=max(1, settings.prefetch) if apart else 1)
    asked = list(reads.values()) if process is None else [reads[process]]
    steps = options.steps_per_call
    schedule = Schedule(source.rows or ENDLESS, given_size, options.remainder, options.epochs)
    batches = schedule.batches_from(Cursor(0, 0))
    known = source.rows is not None and isinstance(options.batch_size, int) and batches != ENDLESS
    return Plan(
        rows=source.rows,
        lanes=source.lanes,
        row_spec=source.spec.structs,
        spec=with_steps(batch, steps),
        leaves=leaves,
        own=frozenset(leaves) - of_rows.keys(),
        batch_size=given_size,
        fitting_size=size,
        multiple_of=multiple,
        shards=shards,
        problems=tuple(problems),
        processes=len(processes),
        reads=tuple(asked),
        lane_owners=tuple(map(tuple, lane_owners)),
        remainder=options.remainder,
        schedule=schedule,
        length=batches // steps if known and not problems else None,
        settings=settings,
        compared={
            "batch_size": given_size,
            "epochs": options.epochs,
            "remainder": options.remainder,
            "bad_rows": options.reading.bad_rows,
            "check_replicas_every": options.reading.check_replicas_every,
            # processes agree on the ends of lanes once in each window of `prefetch` batches
            "prefetch": settings.prefetch if apart else None,
            "leaf": {name: f"{leaf.dtype.name}{list(leaf.shape)}" for name, leaf in leaves.items()},
            "sharding": {name: layout(leaf.sharding, leaf.shape) for name, leaf in leaves.items()},
        },
        memory=Memory.of(
            steps * max(each.local_bytes for each in asked),
            steps * max(each.read_bytes for each in asked),
            steps * _bytes((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves.values()),
            settings,
        ),
    )


def _reads_of(
    processes: Mapping[int, Collection[int]],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    source: SourceMetadata,
    out: RowSpec,
    options: CheckedOptions,
) -> dict[int, ProcessReads]:
    """What each process reads and places, if it owns a device of the sharding. Arguments as in `plan_of`.

    Args:
      leaves: the leaves of the global batch, including `valid` and `place`.
    """
    parts = {name: device_parts(leaf.sharding, leaf.shape) for name, leaf in leaves.items()}
    found = {}
    for owner, ids in processes.items():
        if all(of.keys().isdisjoint(ids) for of in parts.values()):
            continue
        plans = {
            name: leaf_plan([of[device] for device in ids if device in of], leaves[name].shape, name)
            for name, of in parts.items()
        }
        of_rows = tuple(plans[leaf.name] for leaf in out.leaves)
        own = plans.keys() - {leaf.name for leaf in out.leaves}
        rows = union_of_rows(of_rows)
        cut = not all(plan.whole_columns and len(plan.rows) == len(rows) for plan in of_rows)
        transformed = options.transform is not None
        # to replace bad rows, all processes that supply parts of a row must find it bad; so each reads whole rows
        by_leaf = cut and source.reads_columns and not transformed and options.reading.bad_rows == "raise"
        calls: dict[bytes, tuple[Indices, Cuts]] = {}
        for i, leaf in enumerate(source.spec.leaves):
            whole = rows, (slice(None),) * len(leaf.shape)
            here, columns = (of_rows[i].rows, of_rows[i].columns) if by_leaf else whole
            calls.setdefault(here.tobytes(), (here, []))[1].append((i, columns))
        placed = [(plan.local_shape, leaf.placed_dtype) for plan, leaf in zip(of_rows, out.leaves, strict=True)]
        read = [
            (placed[i][0] if by_leaf else (len(rows), *leaf.shape), leaf.dtype)
            for i, leaf in enumerate(source.spec.leaves)
        ]
        found[owner] = ProcessReads(
            process=owner,
            devices=tuple(sorted(ids)),
            rows=rows,
            lanes=_lanes(rows, source.lanes, of_rows[0].global_shape[0]),
            leaves=plans,
            of_rows=of_rows,
            own=frozenset(own),
            own_rows=next((plans[name].rows for name in own), None),
            by_leaf=by_leaf,
            calls=tuple(calls.values()),
            cuts=cut and not by_leaf,
            local_bytes=_bytes((plan.local_shape, leaves[name].dtype) for name, plan in plans.items()),
            as_read=tuple(read),
            changed=tuple(i for i, form in enumerate(read) if transformed or form != placed[i]),
        )
    return found


def multiple_of(out: RowSpec, sharding: Any, lanes: int = 0) -> tuple[int, int]:
    """The number that must divide each batch size, and the number of shards of the batch axis."""
    rows, shards = placed_rows(out), 1
    shardings = jax.tree.leaves(broadcast(sharding, rows))
    for leaf, place in zip(out.leaves, shardings, strict=True):
        check_rank(place, (1, *leaf.shape), leaf.name)
        shards = math.lcm(shards, shards_of(place, 1 + len(leaf.shape))[0])
    return math.lcm(shards, max(1, lanes)), shards


def devices_by_process(sharding: Any, processes: int | None) -> dict[int, list[int]]:
    """{process: ids of its devices} for a sharding or a tree of shardings.

    Args:
      processes: the number of processes; the devices are divided evenly among them, in the order of
        `jax.devices()`. None: each device belongs to the process that owns it.

    Raises:
      ValueError: the number of processes does not divide the devices. The message names numbers that do.
    """
    owners = {id_: process for leaf in jax.tree.leaves(sharding) for id_, process in device_owners(leaf).items()}
    devices = sorted(owners, key=lambda id_: (owners[id_], id_))
    if processes is None:
        return {process: list(group) for process, group in itertools.groupby(devices, owners.__getitem__)}
    checked_integer("processes", processes, at_least=1)
    each, left = divmod(len(devices), processes)
    if left:
        divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        near = [*[n for n in divisors if n < processes][-1:], *[n for n in divisors if n > processes][:1]]
        raise ValueError(
            f"processes must divide the {len(devices)} devices of the mesh into equal parts, got {processes}; "
            f"{' or '.join(map(str, near))} would work"
        )
    return {process: devices[process * each : (process + 1) * each] for process in range(processes)}


def _lanes(rows: Indices, lanes: int, batch_size: int) -> tuple[int, ...]:
    """The lanes that fill these rows of a batch; none if `lanes` is 0."""
    return tuple(np.unique(rows * lanes // batch_size).tolist()) if lanes else ()


def placed_rows(out: RowSpec) -> Any:
    return out.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.placed_dtype) for leaf in out.leaves])


def _bytes(arrays: Iterable[Form]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)


def _by_name(batch: Any) -> dict[str, jax.ShapeDtypeStruct]:
    paths = jax.tree_util.tree_leaves_with_path(batch)
    return {f"batch{jax.tree_util.keystr(path)}": leaf for path, leaf in paths}
