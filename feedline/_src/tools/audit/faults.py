"""Typical faults, inserted between the feed and the audit to show that the audit finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from feedline._src.tools.audit.job import Fault
from feedline._src.tools.audit.layouts import AXES, Layout


def with_fault(
    fault: Fault | None, layout: Layout, batches: Iterator[Any], batches_on: Callable[[Mesh], Iterator[Any]]
) -> Iterator[Any]:
    """The batches, with the fault if it applies to this layout. `batches_on(mesh)` are those on another mesh."""
    if fault == "swap" and layout.name == "data":
        return _swapped(batches)
    if fault == "local-order" and layout.processes > 1 and layout.name == "permuted devices":
        return _by_process(batches, batches_on)
    if fault == "late-state" and layout.saves.startswith("stopped"):
        return _one_ahead(batches)
    return batches


def _swapped(batches: Iterator[Any]) -> Iterator[Any]:
    """Swaps the first two rows of the first shard of the second batch."""

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


def _by_process(batches: Iterator[Any], batches_on: Callable[[Mesh], Iterator[Any]]) -> Iterator[Any]:
    """Process i supplies the i-th block of rows of every batch, and ignores the sharding."""

    def leaf(values: jax.Array, correct: jax.Array) -> Any:
        rows = values.shape[0] // jax.process_count()
        own = np.asarray(values)[jax.process_index() * rows :][:rows]
        return jax.make_array_from_process_local_data(correct.sharding, own, correct.shape)

    one_device = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), AXES)
    for batch, values in zip(batches, batches_on(one_device), strict=False):
        yield jax.tree.map(leaf, values, batch)


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Prefetches one batch without adapting the state, so that the feed's state counts the waiting batch."""
    waiting = next(batches)
    for batch in batches:
        yield waiting
        waiting = batch
