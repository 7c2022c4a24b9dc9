"""Faults as people make them, put between the feed and the audit, to see that the audit finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from feedline.audit.job import Fault
from feedline.audit.layouts import AXES, Layout


def planted(
    fault: Fault | None, layout: Layout, batches: Iterator[Any], over: Callable[[Mesh], Iterator[Any]]
) -> Iterator[Any]:
    """The batches, with the fault in them if this layout has one. `over(mesh)` gives them on another mesh."""
    if fault == "swap" and layout.name == "data":
        return _swapped(batches)
    if fault == "local-order" and layout.processes > 1 and layout.name == "permuted devices":
        return _by_process(batches, over)
    if fault == "late-state" and layout.saves.startswith("stopped"):
        return _one_ahead(batches)
    return batches


def _swapped(batches: Iterator[Any]) -> Iterator[Any]:
    """In the second batch the first two rows of the first shard are exchanged."""

    def leaf(array: jax.Array) -> jax.Array:
        shards = []
        for shard in array.addressable_shards:
            values = np.array(shard.data)
            if len(values) < 2:
                raise ValueError("the fault swap needs two rows in a shard; use a larger --batch-size")
            if not shard.index[0].start:
                values[[0, 1]] = values[[1, 0]]
            shards.append(jax.device_put(values, shard.device))
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

    for number, batch in enumerate(batches):
        yield jax.tree.map(leaf, batch) if number == 1 else batch


def _by_process(batches: Iterator[Any], over: Callable[[Mesh], Iterator[Any]]) -> Iterator[Any]:
    """Process i supplies the i-th stretch of every batch, whatever the sharding says."""

    def leaf(values: jax.Array, meant: jax.Array) -> Any:
        rows = values.shape[0] // jax.process_count()
        own = np.asarray(values)[jax.process_index() * rows :][:rows]
        return jax.make_array_from_process_local_data(meant.sharding, own, meant.shape)

    alone = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), AXES)
    for batch, values in zip(batches, over(alone), strict=False):
        yield jax.tree.map(leaf, values, batch)


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """A prefetching wrapper that forgets the state: the feed's counts the batch that waits in here."""
    waiting = next(batches)
    for batch in batches:
        yield waiting
        waiting = batch
