"""Placed arrays have the values that were placed, leaf by leaf; leaves that do not fit are refused."""

import sys
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import programs
import pytest
from background import at_once
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from partitions import DEVICES, any_layout, cut, devices_of, layouts, mesh_of, meshes, numbered, only, processes

from feedline._src.placement import place
from feedline._src.placement.place import Placement
from feedline._src.plan.shardings import as_shardings, broadcast, plan_leaf, sharded_like, sharded_spec

BY_ROW = NamedSharding(mesh_of((8,)), P("a"))
BY_ROW_AND_COLUMN = NamedSharding(mesh_of((2, 4)), P("a", "b"))
REPLICATED = NamedSharding(mesh_of((2, 4)), P())
BATCH = {"x": 1, "y": {"z": 2, "w": [3, 4]}}
DTYPES = [np.uint8, np.int32, np.float32, np.bool_, jax.numpy.bfloat16]
batches = meshes().flatmap(
    lambda mesh: st.lists(
        st.tuples(layouts(mesh, rows=2 * mesh.size), st.sampled_from(DTYPES)), min_size=1, max_size=3
    )
)


def struct_of(layout, dtype):
    return jax.ShapeDtypeStruct(layout.shape, dtype, sharding=layout.sharding)


@given(leaves=batches)
@settings(max_examples=100, deadline=None)
def test_what_was_placed_is_gathered(leaves):
    spec = {"x": [struct_of(*leaf) for leaf in leaves]}
    values = [numbered(layout.shape).astype(dtype) for layout, dtype in leaves]
    batch = Placement(spec).place(values)
    assert jax.tree.structure(batch) == jax.tree.structure(spec)
    for array, value, (layout, dtype) in zip(batch["x"], values, leaves, strict=True):
        assert array.dtype == dtype
        assert array.sharding == layout.sharding
        assert array.committed
        np.testing.assert_array_equal(np.asarray(array), value)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


class Pair(NamedTuple):
    y: object
    x: object


def test_leaves_are_taken_in_the_order_in_which_jax_flattens_the_spec():
    rows = {"b": Pair(jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((4,), np.int32)), "a": np.int32(0)}
    sharding = {"b": Pair(BY_ROW, BY_ROW_AND_COLUMN), "a": REPLICATED}
    placement = Placement(sharded_spec(rows, 8, sharding))
    a, y, x = np.arange(8, dtype=np.int32), np.arange(8, 16, dtype=np.int32), numbered((8, 4))
    batch = placement.place([a, y, x])
    assert np.asarray(batch["a"]).tolist() == a.tolist()
    assert np.asarray(batch["b"].y).tolist() == y.tolist()
    assert np.asarray(batch["b"].x).tolist() == x.tolist()
    assert [leaf.sharding for leaf in jax.tree.leaves(batch)] == [REPLICATED, BY_ROW, BY_ROW_AND_COLUMN]


@given(layout=any_layout, dealt=processes)
@settings(max_examples=100, deadline=None)
def test_the_global_shape_follows_from_the_part_of_a_process(layout, dealt):
    spec = {"x": struct_of(layout, np.int32)}
    for devices in devices_of(layout.sharding, dealt).values():
        local = cut(numbered(layout.shape), plan_leaf(layout.sharding, layout.shape, devices, "x"))
        with only(devices):
            assert sharded_like({"x": local}, layout.sharding) == spec


def test_a_part_that_the_devices_of_its_process_do_not_divide_is_refused():
    one, two = (sorted(BY_ROW.device_set, key=lambda d: d.id)[part] for part in (slice(0, 5), slice(5, 8)))
    with only(one):
        assert sharded_like(np.zeros(10), BY_ROW).shape == (16,)
        with pytest.raises(
            ValueError,
            match=r"^batch\['x'\]: the batch size must be a multiple of the 5 shards on this process's devices, "
            r"got 12; 10 or 15 would work$",
        ):
            sharded_like({"x": np.zeros(12)}, BY_ROW)
    with only(two):
        assert sharded_like(np.zeros(6), BY_ROW).shape == (16,)
        with pytest.raises(ValueError, match=r"multiple of the 3 shards .*, got 2; 3 would work$"):
            sharded_like(np.zeros(2), BY_ROW)


def test_a_leaf_that_does_not_fit_is_named():
    rows = {"x": [jax.ShapeDtypeStruct((4,), np.uint8), jax.ShapeDtypeStruct((6,), np.uint8)]}
    with pytest.raises(
        ValueError, match=r"^batch\['x'\]\[1\]: the size of axis 1 must .* got 6; 4 or 8 would work$"
    ):
        sharded_spec(rows, 8, BY_ROW_AND_COLUMN)
    with pytest.raises(ValueError, match=r"^batch\['x'\]\[0\]: the batch size must .* got 7; 6 or 8 would work$"):
        sharded_spec(rows, 7, BY_ROW_AND_COLUMN)
    first = SingleDeviceSharding(DEVICES[0])
    with only(DEVICES[1:]), pytest.raises(ValueError, match=r"^batch\['x'\]\[0\]: this process owns no device of"):
        sharded_like({"x": [np.zeros(8, np.uint8)]}, first)


@pytest.mark.parametrize("sharding", [BY_ROW, BY_ROW_AND_COLUMN, REPLICATED], ids=str)
def test_pieces_that_lie_on_their_devices_are_copied_there(sharding, monkeypatch):
    monkeypatch.setattr(place, "_on_one_device", None)
    given = jax.device_put(numbered((8, 4)), sharding)
    placed = place._place_part(sharding, given.shape, False, given)
    assert placed.sharding == sharding
    for shard, piece in zip(placed.addressable_shards, given.addressable_shards, strict=True):
        assert shard.data.unsafe_buffer_pointer() != piece.data.unsafe_buffer_pointer()  # a step may donate it
        np.testing.assert_array_equal(shard.data, piece.data)
    monkeypatch.setattr(place, "device_parts", lambda *_: {1: ((0, 8), (0, 4))})  # a CPU and a GPU, both with id 1
    here, there = (jax.device_put(given, device) for device in jax.devices()[:2])
    np.testing.assert_array_equal(place._place_part(there.sharding, given.shape, False, here), there)


def test_one_sharding_for_each_subtree():
    found = broadcast({"x": BY_ROW, "y": {"z": REPLICATED, "w": BY_ROW_AND_COLUMN}}, BATCH)
    assert found == {"x": BY_ROW, "y": {"z": REPLICATED, "w": [BY_ROW_AND_COLUMN] * 2}}


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (None, r"^sharding must be a jax\.sharding\.Sharding, got None; for example NamedSharding\("),
        (P("a"), r"^sharding must be a jax\.sharding\.Sharding, got P.*; for example"),
        ({"x": BY_ROW, "y": {"z": None, "w": BY_ROW}}, r"^sharding\['y'\]\['z'\] must be .*, got None;"),
        ({}, r"^sharding must be .* or a tree of them, got an empty tree$"),
    ],
)
def test_an_object_that_is_no_sharding_is_refused(sharding, message):
    with pytest.raises(TypeError, match=message):
        as_shardings(sharding)


_FIRST_BATCH = """
import jax, numpy as np
import feedline

def types():
    return {kind.__qualname__ for kind in object.__subclasses__() if kind.__module__.startswith("jaxlib")}

sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
with BUILT as feed:
    before = types()
    next(feed)
    print(types() - before)
"""


@pytest.mark.parametrize(
    "built",
    [
        "feedline.Feed(np.zeros((8, 2)), 4, sharding, prefetch=0)",
        "feedline.prefetch_to_mesh([np.zeros(4)], sharding)",
    ],
)
def test_placing_creates_no_type_of_jax_which_two_threads_could_do_at_once(built):
    script = _FIRST_BATCH.replace("BUILT", built)
    found = programs.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_one_thread_at_a_time_prepares_jax(monkeypatch):
    calls = []
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *_: (calls.append(None), time.sleep(0.05)))
    monkeypatch.setattr(place, "_prepared", threading.Event())
    at_once(lambda _: place.prepare_jax(), range(2))
    assert calls == [None]
