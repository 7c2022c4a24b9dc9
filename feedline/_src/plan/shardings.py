"""Arithmetic on shardings: (sharding, global shape) → the rows and columns that each process reads.

Only `local_rows` and `sharded_like` depend on the process in which they run. What a process reads follows from
its devices and `Sharding.devices_indices_map`, never from its index, since a permuted mesh does not order rows by
process.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from feedline._src.options import checked_integer
from feedline._src.state import digest

Indices = npt.NDArray[np.int64]
Columns = tuple[slice | npt.NDArray[np.int64], ...]
Part = tuple[tuple[int, int], ...]
"""The part of a leaf that a device holds: (start, stop) along each axis."""


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """The part of one leaf that one process supplies.

    Attributes:
      global_shape: the shape of the leaf, with the global batch size first.
      rows: int64[k], ascending: the rows of the global batch that this process supplies.
      columns: for each axis after the first, the columns that the process supplies, ascending; `slice(None)`: all.
    """

    global_shape: tuple[int, ...]
    rows: Indices
    columns: Columns

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the process-local array."""
        pairs = zip(self.columns, self.global_shape[1:], strict=True)
        return (len(self.rows), *(_length(column, size) for column, size in pairs))

    @property
    def whole_columns(self) -> bool:
        """Whether the process supplies all columns of its rows."""
        return all(isinstance(column, slice) and column == slice(None) for column in self.columns)


def plan_leaf(sharding: Sharding, global_shape: tuple[int, ...], devices: Collection[Any], name: str) -> LeafPlan:
    """The part of a leaf that lies on `devices`, as `jax.make_array_from_process_local_data` expects it.

    Along each axis, it contains the ranges on these devices in ascending order. If the devices' parts do not form
    a rectangle, it is the smallest rectangle that contains these parts. `name` is the leaf's name in errors.

    Raises:
      ValueError: the sharding cannot divide this shape, or has none of `devices`.
    """
    check_divides(sharding, global_shape, name)
    ids = {device.id for device in devices}
    parts = device_parts(sharding, global_shape).items()
    return leaf_plan([part for device, part in parts if device in ids], global_shape, name)


def leaf_plan(parts: Collection[Part], global_shape: tuple[int, ...], name: str) -> LeafPlan:
    """The smallest part of a leaf that contains the parts on all devices of a process."""
    if not parts:
        raise ValueError(
            f"{name}: this process owns no device of the sharding's mesh, so it can supply no rows. "
            "Build the mesh from devices of every process that runs the feed, or do not build the feed on this one"
        )
    rows, *columns = (_union(set(ranges)) for ranges in zip(*parts, strict=True))
    return LeafPlan(
        global_shape,
        rows,
        tuple(_as_slice(along, size) for along, size in zip(columns, global_shape[1:], strict=True)),
    )


def device_parts(sharding: Sharding, global_shape: tuple[int, ...]) -> dict[int, Part]:
    """{device id: its part of a leaf}. The devices of an `AbstractMesh` are numbered from 0 in row-major order."""
    mesh = _abstract_mesh(sharding)
    if mesh is None:
        indices: Mapping[Any, tuple[slice, ...]] = sharding.devices_indices_map(global_shape)
        return {
            device.id: tuple(along.indices(size)[:2] for along, size in zip(index, global_shape, strict=True))
            for device, index in indices.items()
        }
    spec: Any = sharding.spec  # type: ignore[attr-defined]
    sizes, names = tuple(mesh.shape.values()), list(mesh.shape)
    places = np.indices(sizes).reshape(len(sizes), -1)  # [mesh axis, device]
    ranges = []
    for entry, size in itertools.zip_longest(spec, global_shape):
        axes = [names.index(axis) for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis]
        part = np.zeros(places.shape[1], np.int64)
        for axis in axes:
            part = part * sizes[axis] + places[axis]
        width = size // math.prod(sizes[axis] for axis in axes)
        ranges.append([(start, start + width) for start in (part * width).tolist()])
    return dict(enumerate(zip(*ranges, strict=True)))


def layout(sharding: Sharding, global_shape: tuple[int, ...]) -> str:
    """Describe the layout of a leaf: the devices in the order of their shards, and a digest of all shards."""
    held = device_parts(sharding, global_shape).items()
    parts = sorted(([start for start, _ in part], device) for device, part in held)
    devices = ", ".join(str(device) for _, device in parts[:8]) + (", …" if len(parts) > 8 else "")
    spec = getattr(sharding, "spec", type(sharding).__name__)
    return f"{spec} on devices {devices} (map {digest(parts)[:8]})"


def device_owners(sharding: Sharding) -> dict[int, int]:
    """{device id: the process that owns the device}. All devices of an `AbstractMesh` belong to process 0."""
    mesh = _abstract_mesh(sharding)
    if mesh is not None:
        return dict.fromkeys(range(mesh.size), 0)
    devices: Collection[Any] = sharding.device_set
    return {device.id: device.process_index for device in devices}


def _abstract_mesh(sharding: Sharding) -> Any:
    """The `AbstractMesh` of a sharding; None if the sharding has devices."""
    mesh = getattr(sharding, "mesh", None)
    return mesh if isinstance(mesh, AbstractMesh) else None


def check_has_devices(sharding: Any) -> None:
    """Refuse a sharding, or a tree of shardings, over an `AbstractMesh`."""
    for leaf in jax.tree.leaves(sharding):
        if _abstract_mesh(leaf) is not None:
            raise ValueError(
                f"batches are placed on devices, and the mesh of {leaf} is abstract; build it over a "
                "jax.sharding.Mesh, or let feedline.FeedOptions.plan say what a feed would do"
            )


def union_of_rows(leaves: Iterable[LeafPlan]) -> Indices:
    """int64[k], ascending: the union of the rows of all leaves."""
    parts = [leaf.rows for leaf in leaves]
    if all(np.array_equal(part, parts[0]) for part in parts):
        return parts[0]
    return np.unique(np.concatenate(parts))


def replicas(sharding: Sharding, global_shape: tuple[int, ...]) -> list[list[int]]:
    """Groups of processes that supply the same part of a leaf, and therefore must read the same bytes.

    Example: [[0, 1], [2, 3]] for `P("data")` on a mesh data=2, model=2, whose four devices are in four processes.
    """
    owners = device_owners(sharding)
    parts: dict[int, set[Part]] = {}
    for device, part in device_parts(sharding, global_shape).items():
        parts.setdefault(owners[device], set()).add(part)
    groups: dict[frozenset[Part], list[int]] = {}
    for process in sorted(parts):
        groups.setdefault(frozenset(parts[process]), []).append(process)
    return list(groups.values())


def local_rows(sharding: Sharding, batch_size: int) -> Indices:
    """Return which rows of a global batch this process supplies.

    Args:
      sharding: the sharding of the batch; only the batch axis matters. Also accepted: a device and, under
        `jax.set_mesh`, a `PartitionSpec`.
      batch_size: rows in the global batch, at least 1.

    Returns:
      int64[k]: offsets in the global batch, ascending. On a permuted mesh, they need not be adjacent. Processes
      that are replicas of each other get the same rows.

    Raises:
      TypeError: the sharding is neither a `NamedSharding` nor a `SingleDeviceSharding`.
      ValueError: the sharding cannot divide `batch_size` rows, or this process owns none of its devices.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> mesh = Mesh(np.array(jax.devices()), ("data",))
      >>> local_rows(NamedSharding(mesh, PartitionSpec("data")), 8)  # in the only process: all of them
      array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    size = checked_integer("batch_size", batch_size, at_least=1)
    first = batch_axis_sharding(as_shardings(sharding))
    check_has_devices(first)
    return plan_leaf(first, (size,), first.addressable_devices, "batch").rows


def as_shardings(sharding: Any) -> Any:
    """Replace each device in a tree, and under `jax.set_mesh` each `PartitionSpec`, by a sharding.

    Raises:
      TypeError: a leaf is not a sharding and cannot be replaced by one, or the tree is empty.
    """

    def leaf(path: Any, given: Any) -> Any:
        if isinstance(given, jax.Device):
            return SingleDeviceSharding(given)
        if isinstance(given, PartitionSpec) and not (mesh := jax.sharding.get_mesh()).empty:
            return NamedSharding(mesh, given)
        if isinstance(given, Sharding):
            return given
        raise TypeError(
            f"sharding{jax.tree_util.keystr(path)} must be a jax.sharding.Sharding, got {given!r}; for example "
            'NamedSharding(mesh, PartitionSpec("data")), or PartitionSpec("data") under jax.set_mesh(mesh)'
        )

    shardings = jax.tree_util.tree_map_with_path(leaf, sharding, is_leaf=lambda x: x is None)
    if not jax.tree.leaves(shardings):
        raise TypeError("sharding must be a jax.sharding.Sharding or a tree of them, got an empty tree")
    return shardings


def batch_axis_sharding(sharding: Sharding) -> Sharding:
    """The sharding of a vector that is split like the batch axis of `sharding`."""
    if isinstance(sharding, NamedSharding):
        return sharding.update(spec=PartitionSpec(*sharding.spec[:1]))
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    raise TypeError(
        f"a NamedSharding or a SingleDeviceSharding is needed to shard the batch axis alone, got {sharding!r}; "
        'for example NamedSharding(mesh, PartitionSpec("data")), or PartitionSpec("data") under jax.set_mesh(mesh)'
    )


def shards_of(sharding: Sharding, ndim: int) -> tuple[int, ...]:
    """The number of shards along each of `ndim` axes. The sharding must not name more axes."""
    devices: int = sharding.num_devices  # each number of shards divides it
    return tuple(devices // size for size in sharding.shard_shape((devices,) * ndim))


def check_divides(sharding: Sharding, global_shape: tuple[int, ...], name: str) -> None:
    """Refuse a shape that the sharding cannot divide into equal shards. The error names a size that works."""
    check_rank(sharding, global_shape, name)
    check_multiples(global_shape, shards_of(sharding, len(global_shape)), "that its mesh axes make", name)


def check_rank(sharding: Sharding, shape: tuple[int, ...], name: str) -> None:
    """Refuse a leaf with fewer axes than the sharding names, and a scalar leaf."""
    spec: Any = getattr(sharding, "spec", ())
    if len(spec) > len(shape):
        raise ValueError(
            f"{name}: the sharding {spec} names {len(spec)} axes, but the leaf has {len(shape)}, with the batch; "
            "shorten the spec, or give this leaf its own sharding"
        )
    if not shape:
        raise ValueError(
            f"{name}: the first axis of a leaf is the batch, and this leaf is a scalar; give it one value a row, "
            "or keep it out of the batch"
        )


def check_multiples(shape: tuple[int, ...], shards: tuple[int, ...], which: str, name: str) -> None:
    """Refuse a shape if an axis is not a multiple of its `shards`. `which` follows "shards" in the message."""
    for axis, (size, count) in enumerate(zip(shape, shards, strict=True)):
        if size % count:
            below, above = size // count * count, -(-size // count) * count
            raise ValueError(
                f"{name}: the {'batch size' if axis == 0 else f'size of axis {axis}'} must be a multiple of the "
                f"{count} shards {which}, got {size}; {f'{below} or ' if below else ''}{above} would work"
            )


def sharded_spec(rows: Any, batch_size: int, sharding: Any) -> Any:
    """The spec of a global batch. `rows`: the spec of a row. `sharding`: a tree that is a prefix of `rows`."""

    def leaf(path: Any, row: Any, place: Sharding) -> jax.ShapeDtypeStruct:
        shape = (batch_size, *row.shape)
        check_divides(place, shape, _name(path))
        return jax.ShapeDtypeStruct(shape, row.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(leaf, rows, broadcast(sharding, rows))


def sharded_like(local: Any, sharding: Any) -> Any:
    """The spec of the global batch if every process supplies a part with the shapes of `local`."""

    def leaf(path: Any, part: Any, place: Sharding) -> jax.ShapeDtypeStruct:
        name = _name(path)
        check_rank(place, part.shape, name)
        shards = shards_of(place, len(part.shape))
        mine = plan_leaf(place, shards, place.addressable_devices, name).local_shape
        check_multiples(part.shape, mine, "on this process's devices", name)
        shape = tuple(size * whole // own for size, whole, own in zip(part.shape, shards, mine, strict=True))
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(leaf, local, broadcast(sharding, local))


def broadcast(sharding: Any, batch: Any) -> Any:
    """A tree like `batch` with the sharding of each leaf. `sharding`: a tree that is a prefix of `batch`."""
    try:
        return jax.tree.broadcast(sharding, batch)
    except ValueError as error:
        raise ValueError(
            "sharding must be one sharding or a tree that is a prefix of the batch, like jit's in_shardings: "
            f"the batch is {jax.tree.structure(batch)}, the shardings are {jax.tree.structure(sharding)}"
        ) from error


def with_steps(spec: Any, steps: int) -> Any:
    """The spec of `steps` batches as one tree: leaves [steps, B, ...], whose first axis is not split.

    `refused` refuses `steps` > 1 with shardings that are neither a `NamedSharding` nor on a single device.
    """
    if steps == 1:
        return spec

    def leaf(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = one.sharding
        if isinstance(sharding, NamedSharding):
            axes = PartitionSpec(None, *sharding.spec)
            sharding = NamedSharding(sharding.mesh, axes, memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct((steps, *one.shape), one.dtype, sharding=sharding)

    return jax.tree.map(leaf, spec)


def _name(path: Any) -> str:
    return f"batch{jax.tree_util.keystr(path)}"


def _union(ranges: Collection[tuple[int, int]]) -> Indices:
    """int64[k], ascending: the union of ranges that are equal or disjoint."""
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in sorted(ranges)])


def _as_slice(columns: Indices, size: int) -> slice | Indices:
    """Return adjacent columns as a slice, because indexing with a slice makes a view; else return the indices."""
    if len(columns) == size:
        return slice(None)
    first, last = int(columns[0]), int(columns[-1])
    return slice(first, last + 1) if last + 1 - first == len(columns) else columns


def _length(column: slice | Indices, size: int) -> int:
    return len(range(size)[column]) if isinstance(column, slice) else len(column)
