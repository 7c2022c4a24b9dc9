"""The plan against brute force: every element has a number, and the numbers of each process are collected.

Processes are made up: the devices are dealt out to them, evenly or not, adjacent or interleaved.
"""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from partitions import DEVICES, any_layout, cut, devices_of, mesh_of, numbered, only, owned, processes

from feedline import local_rows
from feedline._src.plan.shardings import as_shardings, batch_axis_sharding, check_divides, plan_leaf, replicas

BACKWARDS = range(7, -1, -1)
EVENS_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]


def smallest_rectangle(mask):
    """For each axis the indices at which any element is True."""
    return [np.flatnonzero(mask.any(axis=tuple(set(range(mask.ndim)) - {axis}))) for axis in range(mask.ndim)]


@given(layout=any_layout, dealt=processes)
@settings(max_examples=300, deadline=None)
def test_a_process_supplies_the_smallest_rectangle_of_what_its_devices_own(layout, dealt):
    values = numbered(layout.shape)
    for devices in devices_of(layout.sharding, dealt).values():
        plan = plan_leaf(layout.sharding, layout.shape, devices, "x")
        mine = owned(layout, devices)
        axes = smallest_rectangle(mine)
        local = cut(values, plan)
        assert plan.rows.dtype == np.int64
        assert plan.rows.tolist() == axes[0].tolist()
        np.testing.assert_array_equal(local, values[np.ix_(*axes)])
        assert set(values[mine].tolist()) <= set(local.ravel().tolist())
        assert plan.local_shape == local.shape
        assert plan.global_shape == layout.shape
        assert plan.whole_columns == (local.shape[1:] == layout.shape[1:])


def found_by_jax(local, layout, devices):
    """{device: its shard}, computed as `jax.make_array_from_process_local_data` documents it."""
    indices = {device: layout.sharding.devices_indices_map(layout.shape)[device] for device in devices}
    where = {device: [] for device in devices}
    for axis, (size, whole) in enumerate(zip(local.shape, layout.shape, strict=True)):
        spans = {device: index[axis].indices(whole)[:2] for device, index in indices.items()}
        starts = sorted({begin for begin, _ in spans.values()})
        for device, (begin, end) in spans.items():
            assert size in (whole, len(starts) * (end - begin))
            at = begin if size == whole else starts.index(begin) * (end - begin)
            where[device].append(slice(at, at + end - begin))
    return {device: jax.device_put(local[tuple(part)], device) for device, part in where.items()}


@given(layout=any_layout, dealt=processes)
@settings(max_examples=200, deadline=None)
def test_the_parts_of_all_processes_gather_to_the_whole(layout, dealt):
    values = numbered(layout.shape)
    shards = {}
    for devices in devices_of(layout.sharding, dealt).values():
        local = cut(values, plan_leaf(layout.sharding, layout.shape, devices, "x"))
        shards |= found_by_jax(local, layout, devices)
    in_order = [shards[device] for device in layout.sharding.devices_indices_map(layout.shape)]
    placed = jax.make_array_from_single_device_arrays(layout.shape, layout.sharding, in_order)
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
    np.testing.assert_array_equal(np.asarray(placed), values)


@pytest.mark.parametrize(
    ("order", "column"),
    [(range(8), slice(0, 4)), (BACKWARDS, slice(4, 8)), (EVENS_FIRST, [0, 1, 4, 5]), (None, slice(None))],
)
def test_adjacent_columns_are_a_slice_so_that_cutting_them_copies_nothing(order, column):
    sharding = NamedSharding(mesh_of((8,), order or range(8)), P(None, "a"))
    plan = plan_leaf(sharding, (3, 8), DEVICES[:4] if order else DEVICES, "x")
    (found,) = plan.columns
    assert found == column if isinstance(column, slice) else found.tolist() == column
    assert plan.whole_columns == (order is None)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class FakeSharding:
    """A sharding whose devices belong to several processes."""

    real: Any
    dealt: Any

    @property
    def device_set(self):
        return {FakeDevice(device.id, self.dealt[device.id]) for device in self.real.device_set}

    def devices_indices_map(self, shape):
        return self.real.devices_indices_map(shape)


@given(layout=any_layout, dealt=processes)
@settings(max_examples=200, deadline=None)
def test_replicas_are_the_processes_that_own_the_same_elements(layout, dealt):
    values = numbered(layout.shape)
    owners = devices_of(layout.sharding, dealt)
    elements = {process: frozenset(values[owned(layout, devices)].tolist()) for process, devices in owners.items()}
    groups = replicas(FakeSharding(layout.sharding, dealt), layout.shape)
    assert sorted(process for group in groups for process in group) == sorted(owners)
    for process, others in elements.items():
        (group,) = (group for group in groups if process in group)
        assert group == sorted(other for other in owners if elements[other] == others)


@given(layout=any_layout, at=st.integers(0, 2), size=st.integers(1, 100))
@settings(max_examples=300, deadline=None)
def test_sizes_that_the_shards_do_not_divide_are_refused_with_the_nearest_that_work(layout, at, size):
    sharding, shape = layout
    axis = at % len(shape)
    shards = shape[axis] // sharding.shard_shape(shape)[axis]

    def with_size(other):
        return (*shape[:axis], other, *shape[axis + 1 :])

    if size % shards == 0:
        check_divides(sharding, with_size(size), "x")
        return
    with pytest.raises(ValueError, match=r"^x: the ") as error:
        plan_leaf(sharding, with_size(size), DEVICES, "x")
    message = str(error.value)
    what, found, numbers = re.fullmatch(
        r"x: the (batch size|size of axis \d) must be a multiple of the (\d+) shards that its mesh axes make, "
        rf"got {size}; (.+) would work",
        message,
    ).groups()
    assert what == ("batch size" if axis == 0 else f"size of axis {axis}")
    assert int(found) == shards
    working = [other for other in range(1, 300) if other % shards == 0]
    below, above = [n for n in working if n < size][-1:], [n for n in working if n > size][:1]
    assert [int(n) for n in numbers.split(" or ")] == below + above
    for number in below + above:
        plan_leaf(sharding, with_size(number), DEVICES, "x")


def test_a_device_or_a_spec_under_set_mesh_stands_for_its_sharding():
    mesh = mesh_of((8,))
    assert as_shardings(DEVICES[3]) == SingleDeviceSharding(DEVICES[3])
    with pytest.raises(TypeError, match=r"must be .* or PartitionSpec\(\"data\"\) under jax.set_mesh"):
        local_rows(P("a"), 16)
    with jax.set_mesh(mesh):
        assert as_shardings({"x": P("a"), "y": [P()]}) == {
            "x": NamedSharding(mesh, P("a")),
            "y": [NamedSharding(mesh, P())],
        }
        assert local_rows(P("a"), 16).tolist() == list(range(16))
    assert local_rows(DEVICES[0], 3).tolist() == [0, 1, 2]


def test_local_rows_of_a_permuted_mesh_need_not_be_adjacent():
    sharding = NamedSharding(mesh_of((8,), EVENS_FIRST), P("a"))
    with only(DEVICES[:4]):
        assert local_rows(sharding, np.int64(16)).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    with only(DEVICES[:4]), pytest.raises(ValueError, match="owns no device"):
        local_rows(SingleDeviceSharding(DEVICES[4]), 16)
    assert local_rows(SingleDeviceSharding(DEVICES[4]), 3).tolist() == [0, 1, 2]


def test_the_batch_axis_stays_in_the_memory_where_the_batch_lies():
    sharding = NamedSharding(mesh_of((2, 4)), P("a", "b"), memory_kind="pinned_host")
    assert batch_axis_sharding(sharding) == NamedSharding(mesh_of((2, 4)), P("a"), memory_kind="pinned_host")


@pytest.mark.parametrize(
    ("size", "error"), [(12, "8 or 16 would work"), (0, "batch_size must be at least 1, got 0")]
)
def test_batch_sizes_that_have_no_local_rows(size, error):
    with pytest.raises(ValueError, match=error):
        local_rows(NamedSharding(mesh_of((8,)), P("a")), size)
