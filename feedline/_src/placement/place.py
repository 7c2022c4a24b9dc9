"""Makes the global arrays of a batch from the process-local arrays of each process."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from feedline._src.placement.plan import (
    LeafPlan,
    check_divides,
    check_multiples,
    check_rank,
    plan_leaf,
    shards_of,
)
from feedline._src.runtime.threads import JaxSettings


@dataclasses.dataclass(frozen=True)
class Placement:
    """The shardings of a batch, and the part of each leaf that this process supplies.

    Leaves are placed one by one. One `jax.device_put` of the list takes longer for any number of leaves: 0.56 in
    place of 0.48 ms for 16 leaves on eight CPU devices (jax 0.10).

    Attributes:
      spec: tree of `jax.ShapeDtypeStruct` with shardings, of the global batch.
      plans: what this process supplies of each leaf, in the order in which JAX flattens `spec`.
      settings: JAX's settings while a batch is placed, so that 64-bit leaves stay 64-bit on every thread.
      ragged: the numbers of the leaves whose axis 1 differs between batches, all alike; `spec` has its maximum.
    """

    spec: Any
    plans: tuple[LeafPlan, ...]
    settings: JaxSettings = dataclasses.field(default_factory=JaxSettings.of_this_thread)
    ragged: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _prepare_jax()

    @classmethod
    def of(cls, spec: Any) -> Placement:
        """The placement of a batch whose leaves have these shapes, dtypes and shardings.

        Raises:
          ValueError: a sharding cannot divide its leaf, or this process owns no device of it.
        """
        plans = [
            plan_leaf(leaf.sharding, leaf.shape, leaf.sharding.addressable_devices, _name(path))
            for path, leaf in jax.tree_util.tree_leaves_with_path(spec)
        ]
        return cls(spec, tuple(plans))

    def place(self, leaves: Sequence[np.ndarray[Any, Any] | jax.Array]) -> Any:
        """The global arrays of process-local `leaves`. Returns before the transfers are done.

        Leaves that are jax.Arrays are copied from device to device. It allows its own transfers: they are
        intended, and must not fail under a transfer guard of the user. With several processes JAX counts them as
        implicit transfers.
        """
        if self.ragged:
            return self._of_length(leaves[self.ragged[0]].shape[1]).place(leaves)
        with self.settings.applied(), jax.transfer_guard_host_to_device("allow"):
            arrays = [place(leaf) for place, leaf in zip(self._places, leaves, strict=True)]
        return self._treedef.unflatten(arrays)

    @functools.cached_property
    def local_bytes(self) -> int:
        leaves = jax.tree.leaves(self.spec)
        return sum(
            math.prod(plan.local_shape) * leaf.dtype.itemsize
            for plan, leaf in zip(self.plans, leaves, strict=True)
        )

    def _of_length(self, length: int) -> Placement:
        """The placement of the batches whose ragged leaves have this length."""
        if length not in self._by_length:
            leaves, plans = jax.tree.leaves(self.spec), list(self.plans)
            for i in self.ragged:
                shape = (leaves[i].shape[0], length, *leaves[i].shape[2:])
                leaves[i] = jax.ShapeDtypeStruct(shape, leaves[i].dtype, sharding=leaves[i].sharding)
                plans[i] = dataclasses.replace(plans[i], global_shape=shape)
            self._by_length[length] = Placement(self._treedef.unflatten(leaves), tuple(plans), self.settings)
        return self._by_length[length]

    # computed once: for a small batch on several devices, placing costs mostly Python time
    @functools.cached_property
    def _by_length(self) -> dict[int, Placement]:
        return {}

    @functools.cached_property
    def _treedef(self) -> Any:
        return jax.tree.structure(self.spec)

    @functools.cached_property
    def _places(self) -> list[Callable[[np.ndarray[Any, Any] | jax.Array], jax.Array]]:
        return [
            functools.partial(_place_all if leaf.sharding.is_fully_addressable else _place_local, leaf)
            for leaf in jax.tree.leaves(self.spec)
        ]


@functools.cache
def _prepare_jax() -> None:
    """Let jax create its device iterator before any thread places a batch.

    jaxlib creates that Python type at its first use, where two threads at once can crash: of 192 processes on two
    cores, two ended by SIGSEGV and three by a TypeError in jax (0.10).
    """
    with jax.transfer_guard_host_to_device("allow"):
        sharding = SingleDeviceSharding(jax.local_devices()[0])
        jax.make_array_from_callback((), sharding, lambda _: np.zeros((), np.uint8))


def check_not_split(name: str, leaf: jax.ShapeDtypeStruct) -> None:
    """Refuse a sharding that splits axis 1 of a ragged leaf."""
    shards = shards_of(leaf.sharding, len(leaf.shape))[1]
    if shards > 1:
        raise ValueError(
            f"{name}: a sharding must not split axis 1 of a ragged leaf, whose size differs between batches, and "
            f'{leaf.sharding} splits it into {shards}; shard the batch axis alone, as PartitionSpec("data") does'
        )


def _place_local(leaf: jax.ShapeDtypeStruct, values: np.ndarray[Any, Any] | jax.Array) -> jax.Array:
    if isinstance(values, jax.Array):
        return _from_devices(leaf, values)
    array: jax.Array = jax.make_array_from_process_local_data(leaf.sharding, values, leaf.shape)
    return array


def _from_devices(leaf: jax.ShapeDtypeStruct, values: jax.Array) -> jax.Array:
    """Make a global array of process-local values that lie on devices, from device to device."""
    indices: Any = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    # where this process's part begins along each axis, of all starts that its devices have
    starts = [
        sorted({cut[axis].indices(size)[0] for cut in indices.values()}) for axis, size in enumerate(leaf.shape)
    ]
    shards = []
    for device, cut in indices.items():
        local = []
        for axis, size in enumerate(leaf.shape):
            start, stop, _ = cut[axis].indices(size)
            first = starts[axis].index(start) * (stop - start)
            local.append(slice(first, first + stop - start))
        shards.append(jax.device_put(values[tuple(local)], device, may_alias=False))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _place_all(leaf: jax.ShapeDtypeStruct, values: np.ndarray[Any, Any] | jax.Array) -> jax.Array:
    """Place a leaf that this process supplies whole, in half the time of `_place_local` for a small batch."""
    if isinstance(values, jax.Array):  # a copy, since the step may donate its batch
        array: jax.Array = jax.device_put(values, leaf.sharding, may_alias=False)
        return array
    if values.shape != leaf.shape:
        raise ValueError(
            f"a leaf must have the shape that was planned, {list(leaf.shape)}, got {list(values.shape)}"
        )
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, values.__getitem__)


def sharded_spec(rows: Any, batch_size: int, sharding: Any) -> Any:
    """The spec of a global batch, from that of a row and a sharding that is a prefix of its tree."""

    def leaf(path: Any, row: Any, place: Sharding) -> jax.ShapeDtypeStruct:
        shape = (batch_size, *row.shape)
        check_divides(place, shape, _name(path))
        return jax.ShapeDtypeStruct(shape, row.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(leaf, rows, broadcast(sharding, rows))


def sharded_like(local: Any, sharding: Any) -> Any:
    """The spec of the global batch of which every process supplies a part with the shapes of `local`."""

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
    """A sharding for each leaf of `batch`, from a tree that is a prefix of it."""
    check_shardings(sharding)
    try:
        return jax.tree.broadcast(sharding, batch)
    except ValueError as error:
        raise ValueError(
            "sharding must be one sharding or a tree that is a prefix of the batch, as jit's in_shardings: "
            f"the batch is {jax.tree.structure(batch)}, the shardings are {jax.tree.structure(sharding)}"
        ) from error


def check_shardings(sharding: Any) -> None:
    """Refuse a tree with a leaf that is no sharding."""
    leaves = jax.tree_util.tree_leaves_with_path(sharding, is_leaf=lambda x: x is None)
    for path, leaf in leaves:
        if not isinstance(leaf, Sharding):
            raise TypeError(
                f"sharding{jax.tree_util.keystr(path)} must be a jax.sharding.Sharding, got {leaf!r}; "
                'for example NamedSharding(mesh, PartitionSpec("data")), or PartitionSpec("data") under '
                "jax.set_mesh(mesh)"
            )
    if not leaves:
        raise TypeError("sharding must be a jax.sharding.Sharding or a tree of them, got an empty tree")


def with_steps(spec: Any, steps: int) -> Any:
    """The spec of `steps` batches as one tree: leaves [steps, B, ...], of which the first axis is not split."""
    if steps == 1:
        return spec

    def leaf(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = one.sharding
        if isinstance(sharding, NamedSharding):
            axes = PartitionSpec(None, *sharding.spec)
            sharding = NamedSharding(sharding.mesh, axes, memory_kind=sharding.memory_kind)
        elif not isinstance(sharding, SingleDeviceSharding):
            raise ValueError(
                f"steps_per_call={steps} adds an axis to the batch, which only a NamedSharding can be given; got "
                f"{sharding}"
            )
        return jax.ShapeDtypeStruct((steps, *one.shape), one.dtype, sharding=sharding)

    return jax.tree.map(leaf, spec)


def with_steps_in_front(plan: LeafPlan, steps: int) -> LeafPlan:
    """What a process supplies of a leaf [steps, B, ...], of which the first axis is not split."""
    if steps == 1:
        return plan
    return LeafPlan((steps, *plan.global_shape), np.arange(steps), (plan.rows, *plan.columns))


def _name(path: Any) -> str:
    return f"batch{jax.tree_util.keystr(path)}"
