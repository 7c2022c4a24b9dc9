"""Makes the global arrays of a batch from the process-local arrays of each process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from feedline._src.plan.shardings import device_parts
from feedline._src.record import PlaceTimes
from feedline._src.runtime.threads import JaxSettings, Stopwatch, annotation, this_thread

HostLeaf = np.ndarray[Any, Any] | jax.Array


class LocalBatch(Protocol):
    """The attributes of a `HostBatch` that placing needs: its leaves, and the cursor after the batch."""

    @property
    def leaves(self) -> list[Any]: ...
    @property
    def after(self) -> Any: ...
    def _replace(self, *, leaves: list[Any]) -> Any: ...


class Placed(NamedTuple):
    """A global batch on the mesh, the host batch without its leaves, and the times of its placement."""

    batch: Any
    metadata: Any
    times: PlaceTimes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Makes global arrays of host batches. Any thread may call it.

    Leaves are placed one by one. One `jax.device_put` of all leaves takes longer, however many there are: 0.56
    instead of 0.48 ms for 16 leaves on eight CPU devices (jax 0.10).

    Attributes:
      spec: the global batch as a tree of `jax.ShapeDtypeStruct` with shardings.
      local_bytes: bytes of this process's part of a batch.
      ragged: the indices of the ragged leaves. In one batch, they all have the same size along axis 1; the size
        differs between batches, and `spec` has the largest size.
      jax_settings: JAX's settings while a batch is placed, so that 64-bit leaves stay 64-bit on every thread.
    """

    spec: Any
    local_bytes: int = 0
    ragged: tuple[int, ...] = ()
    jax_settings: JaxSettings = dataclasses.field(default_factory=JaxSettings.of_this_thread)

    def __post_init__(self) -> None:
        prepare_jax()

    def placed(
        self,
        host: LocalBatch,
        on_placed: Callable[[PlaceTimes, Sequence[Any]], None],
        check: Callable[[list[Any], Any], None] | None = None,
    ) -> Placed:
        """Place a batch, and measure how long that takes.

        Args:
          on_placed: called with the times and the global arrays. Must not raise.
          check: called with the leaves and `host.after` before placing; compares them between processes.
        """
        if check is not None:
            check(host.leaves, host.after)
        watch = Stopwatch()
        with annotation("place"):
            batch = self.place(host.leaves)
        times = PlaceTimes(this_thread(), watch.began, *watch.lap())
        on_placed(times, jax.tree.leaves(batch))
        return Placed(batch, host._replace(leaves=[]), times)

    def place(self, leaves: Sequence[HostLeaf]) -> Any:
        """Make the global arrays of process-local `leaves`. Returns before the transfers are done.

        Leaves that are jax.Arrays are copied from device to device. The transfers are intended, but JAX counts
        them as implicit if there are several processes, so this call overrides a user's transfer guard.
        """
        with self.jax_settings.applied(), jax.transfer_guard_host_to_device("allow"):
            arrays = [place(leaf) for place, leaf in zip(self._places, leaves, strict=True)]
        return self._treedef.unflatten(arrays)

    # computed once, because placing a small batch on several devices costs mostly Python time
    @functools.cached_property
    def _treedef(self) -> Any:
        return jax.tree.structure(self.spec)

    @functools.cached_property
    def _places(self) -> list[Callable[[HostLeaf], jax.Array]]:
        return [
            functools.partial(_place_whole, leaf.sharding)
            if leaf.sharding.is_fully_addressable
            else functools.partial(_place_part, leaf.sharding, leaf.shape, i in self.ragged)
            for i, leaf in enumerate(jax.tree.leaves(self.spec))
        ]


_preparing, _prepared = threading.RLock(), threading.Event()


def prepare_jax() -> None:
    """Let jax create its device iterator before any thread places a batch.

    jaxlib creates the iterator's Python type at its first use. If two threads do this at once, they can crash: of
    192 processes on two cores, two ended by SIGSEGV and three by a TypeError in jax (0.10).
    """
    if _prepared.is_set():
        return
    acquired = _preparing.acquire(timeout=10)  # an interrupt may have left it held
    try:
        if not _prepared.is_set():
            with jax.transfer_guard_host_to_device("allow"):
                sharding = SingleDeviceSharding(jax.local_devices()[0])
                jax.make_array_from_callback((), sharding, lambda _: np.zeros((), np.uint8))
            _prepared.set()
    finally:
        if acquired:
            _preparing.release()


def _place_whole(sharding: Sharding, values: HostLeaf) -> jax.Array:
    """Place a leaf that this process supplies whole. For a small batch, `_place_part` would take twice as long."""
    if not isinstance(values, jax.Array):
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
    lies = values.sharding
    if not lies.is_equivalent_to(sharding, values.ndim) and (lies.num_devices > 1 or sharding.is_fully_replicated):
        values = _on_one_device(values)
    array: jax.Array = jax.device_put(values, sharding, may_alias=False)  # a copy, since a step may donate it
    return array


def _place_part(sharding: Sharding, shape: tuple[int, ...], ragged: bool, values: HostLeaf) -> jax.Array:
    """Place a leaf of which this process supplies a part. `ragged`: axis 1 is as long as in `values`."""
    if ragged:
        shape = (shape[0], values.shape[1], *shape[2:])
    if not isinstance(values, jax.Array):
        array: jax.Array = jax.make_array_from_process_local_data(sharding, values, shape)
        return array
    parts = device_parts(sharding, shape)
    devices: Collection[Any] = sharding.addressable_devices
    held = {device.id: parts[device.id] for device in devices}
    # along each axis, the starts of all parts on the devices of this process
    starts = [sorted({start for start, _ in ranges}) for ranges in zip(*held.values(), strict=True)]
    local = {}  # the parts of `values` for these devices
    for device, part in held.items():
        at = [(every.index(start), stop - start) for every, (start, stop) in zip(starts, part, strict=True)]
        local[device] = tuple((i * size, (i + 1) * size) for i, size in at)
    pieces = {shard.device: shard.data for shard in values.addressable_shards}
    # ids are unique only within a platform
    if pieces.keys() != devices or local != device_parts(values.sharding, values.shape):
        one = _on_one_device(values) if len(pieces) > 1 else values
        with _on(one.device):
            pieces = {device: one[tuple(slice(*along) for along in local[device.id])] for device in devices}
    shards = [jax.device_put(pieces[device], device, may_alias=False) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _on_one_device(values: jax.Array) -> Any:
    """Copy an array to one of its devices, from where `jax.device_put` copies from device to device.

    From several devices, it may go through the host, or return the memory of `values`, which a step may then
    donate (jax 0.10). A program on all devices would be faster, but its collectives would race with the step's.
    """
    shards = [shard for shard in values.addressable_shards if shard.replica_id == 0]
    starts = tuple(tuple(along.start or 0 for along in shard.index) for shard in shards)
    pieces = jax.device_put([shard.data for shard in shards], shards[0].device)
    with _on(shards[0].device):
        return _joined(values.shape, starts, pieces)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _joined(shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...], pieces: list[jax.Array]) -> jax.Array:
    whole = jnp.pad(pieces[0], [(0, size - part) for size, part in zip(shape, pieces[0].shape, strict=True)])
    for start, piece in zip(starts, pieces, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, start)
    return whole


def _on(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Let a program run on one device, although a user's `jax.set_mesh` may demand the devices of a mesh."""
    return jax.set_mesh(Mesh(np.array([device]), ("one",)))
