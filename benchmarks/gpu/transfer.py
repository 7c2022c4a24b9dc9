"""How fast are batches transferred to the devices, compared with copies from pinned memory, the limit?"""

import functools
import time
from collections import deque

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared.rounds import alternate, compared

from feedline._src.loader.staging import Staging
from feedline._src.placement.place import Placement

_GROUP = 4
"""Host batches that are created, untimed, before they are transferred one after the other."""
_IN_FLIGHT = 2
"""Transfers in progress at the same time, as with a feed at its default `prefetch`."""


def transfer_cases(scale):
    """Pageable memory and feedline's slabs, in one leaf and in many, to one device and to all."""
    return {
        f"{mb:g} MB, {leaves} leaves, {count} devices": functools.partial(_transfer, mb, leaves, count, scale)
        for mb in scale.sizes_mb
        for leaves in scale.leaves
        for count in sorted({1, len(jax.devices())})
    }


def _transfer(mb, leaves, count, scale):
    spec = _spec(mb, leaves, count)
    staging = Staging([(leaf.shape, np.dtype(np.uint8)) for leaf in spec], _GROUP)

    def staged():
        slabs = staging.lease()
        for slab in slabs:
            slab[...] = 1  # allocates its pages
        return slabs

    return _beside_pinned(
        spec, {"pageable": lambda: [np.full(leaf.shape, 1, np.uint8) for leaf in spec], "staged": staged}, scale
    )


def _beside_pinned(spec, hosts, scale):
    """Bytes per second from each kind of memory, measured alternately with copies from pinned memory."""
    placement, shardings = Placement.of(spec), [leaf.sharding for leaf in spec]
    pinned = jax.device_put(
        [np.full(leaf.shape, 1, np.uint8) for leaf in spec],
        [sharding.with_memory_kind("pinned_host") for sharding in shardings],
    )
    size = sum(leaf.shape[0] * leaf.shape[1] for leaf in spec)
    entrants = {name: functools.partial(_rate, host, placement.place, size) for name, host in hosts.items()}
    entrants["pinned"] = functools.partial(_rate, lambda: pinned, lambda x: jax.device_put(x, shardings), size)
    alternate(entrants, 1, 0)  # allocates memory on host and devices
    rates = alternate(entrants, scale.rounds, scale.seconds)
    return {
        "mb": size / 1e6,
        "leaves": len(spec),
        "devices": spec[0].sharding.num_devices,
        "bytes_per_s": compared(rates, "pinned"),
    }


def _rate(host, place, size, seconds):
    """Bytes per second, from the call of `place` until the arrays are ready. `host` makes a batch, untimed."""
    spent, moved, until = 0.0, 0, time.perf_counter() + seconds
    while not moved or time.perf_counter() < until:
        batches, placed = [host() for _ in range(_GROUP)], deque()
        began = time.perf_counter()
        for batch in batches:
            if len(placed) == _IN_FLIGHT:
                jax.block_until_ready(placed.popleft())
            placed.append(place(batch))
        jax.block_until_ready(list(placed))
        spent += time.perf_counter() - began
        moved += size * _GROUP
    return moved / spent


def _spec(mb, leaves, count):
    """The spec of a batch of `mb` MB in `leaves` uint8 leaves, with rows of at most 4 KiB."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), PartitionSpec("data"))
    shard = int(mb * 1e6) // leaves // count
    width = max(64, min(4096, shard // 64 * 64))
    shape = (max(1, shard // width) * count, width)
    return [jax.ShapeDtypeStruct(shape, np.uint8, sharding=sharding)] * leaves
