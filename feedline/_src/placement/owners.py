"""Which processes read each lane of a stream: those that supply a row of that lane."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

from feedline._src.placement.plan import shards_of

_log = logging.getLogger("feedline")
Owners = tuple[tuple[int, ...], ...]
"""For each lane the processes that read it, ascending. The first one saves the lane."""


def owners_of(leaves: Iterable[Any], count: int) -> Owners:
    """The owners of each of `count` lanes.

    Args:
      leaves: the leaves of the batch, each with a sharding and a global shape. `count` divides the batch size.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))
      >>> owners_of([jax.ShapeDtypeStruct((8, 3), np.float32, sharding=sharding)], 2)
      ((0,), (0,))
    """
    owners: list[set[int]] = [set() for _ in range(count)]
    for leaf in leaves:
        size = leaf.shape[0]
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            start, stop, _ = index[0].indices(size)
            for lane in range(start * count // size, -(-stop * count // size)):
                owners[lane].add(device.process_index)
    return tuple(tuple(sorted(processes)) for processes in owners)


def read_everywhere(owners: Owners) -> bool:
    """Whether each process reads every lane, and so knows without the others where each lane ends."""
    return len(set(owners)) == 1


def warn_of_shared_lanes(owners: Owners, leaves: Iterable[Any]) -> None:
    """Log a warning if several processes read the same lane, with a number of lanes that avoids this."""
    shards = math.lcm(*(shards_of(leaf.sharding, len(leaf.shape))[0] for leaf in leaves))
    shared = sum(len(processes) > 1 for processes in owners)
    if shared and len(owners) % shards:
        _log.warning(
            "%d of %d lanes run on several processes: the batch axis has %d shards, and some hold a part of a "
            "lane's rows; with a multiple of %d lanes each would run where its rows are",
            shared,
            len(owners),
            shards,
            shards,
        )
