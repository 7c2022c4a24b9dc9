"""Which rows a batch holds, and that its parts together write all of it, however the leaves are sharded."""

import contextlib
import gc
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from local_forms import planned

from feedline._src.loader.random_access import LocalBatches, RandomAccess
from feedline._src.loader.staging import BatchBuffers
from feedline._src.options import Order
from feedline._src.order.epoch import SingleOrder, rows_at
from feedline._src.order.schedule import Cursor, Schedule
from feedline._src.sources.arrays import ArraySource

BATCH = 16


def access_of(source, order, form):
    schedule = Schedule(40, BATCH, "wrap", None)
    return RandomAccess(source, SingleOrder(order, 40), form, BatchBuffers(form, 2), schedule)


SOURCE = {
    "narrow": np.arange(40, dtype=np.int64),  # cast to int32 when it is placed
    "wide": np.arange(40 * 6, dtype=np.float32).reshape(40, 6),
}
CUTS = {"narrow": PartitionSpec("model"), "wide": PartitionSpec("data", "model")}  # `wide` cuts columns, too


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 99])
@pytest.mark.parametrize("way", ["by leaf", "whole rows", "transformed"])
@pytest.mark.parametrize("owned", [[0], [5], [2, 3, 7], range(8)], ids=str)
def test_the_parts_of_a_batch_write_all_of_it(parts, way, owned):
    """The process owns some devices of a 4 × 2 mesh."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    source = ArraySource([SOURCE])
    double = (
        (lambda batch, rows: {name: values * 2 for name, values in batch.items()})
        if way == "transformed"
        else None
    )
    _, (form, *_) = planned(
        source.spec,
        BATCH,
        {name: NamedSharding(mesh, CUTS[name]) for name in SOURCE},
        [[jax.devices()[i] for i in owned], [device for device in jax.devices() if device.id not in owned]],
        reads_columns=way == "by leaf",
        transform=double,
    )
    batches = LocalBatches(access_of(source, Order(seed=3), form), Cursor(0, 0), parts)
    order = np.concatenate([rows_at(Order(seed=3), 40, epoch, np.arange(40)) for epoch in range(3)])
    for k in range(5):
        read = [batches.read(k, part) for part in reversed(range(batches.parts))]
        (leaves,) = [batch.leaves for batch in read if batch]
        rows = order[k * BATCH : (k + 1) * BATCH]
        for found, name, plan in zip(leaves, SOURCE, form.part.of_rows, strict=True):
            expected = SOURCE[name][rows[plan.rows]] * (2 if double else 1)
            for axis, column in enumerate(plan.columns, start=1):
                expected = expected.take(np.arange(expected.shape[axis])[column], axis)
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == {"narrow": np.int32, "wide": np.float32}[name]


def test_the_memory_of_a_batch_that_failed_is_freed_with_its_error():
    """Reference counts free it: an error that waits for the garbage collector would hold the batch for long."""
    memory = []

    def fails(batch, rows):
        memory.append(weakref.ref(batch["narrow"].base.base))
        raise ZeroDivisionError

    source = ArraySource([SOURCE])
    device = jax.devices()[0]
    _, (form,) = planned(source.spec, BATCH, device, [[device]], transform=fails)
    batches = LocalBatches(access_of(source, Order(), form), Cursor(0, 0), 2)
    gc.disable()
    try:
        assert batches.read(0, 1) is None
        with contextlib.suppress(ZeroDivisionError):
            batches.read(0, 0)
        assert [lease() for lease in memory] == [None, None]
    finally:
        gc.enable()
