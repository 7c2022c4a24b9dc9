"""`prefetch_to_mesh` places the batches of any iterator ahead and in order; its state is the iterator's."""

import copy as copies
import functools
import itertools
import pickle
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from background import PATIENCE_S, arrived, spawn
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from test_feed_lifecycle import interrupted_at

from feedline import Reading, StallError, prefetch_to_mesh

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SHARDING = NamedSharding(MESH, PartitionSpec("data"))


def numbered(count, rows=8):
    for i in range(count):
        yield {"x": np.full((rows, 4), i, np.float32), "y": np.arange(rows) + i}


class Reusing:
    """An iterator that writes every batch into the same memory, and counts the batches that it gave."""

    def __init__(self, count):
        self.batch, self.count, self.given, self.closed = np.empty((8, 64), np.float32), count, 0, 0
        self.exhausted = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == self.count:
            self.exhausted.set()
            raise StopIteration
        self.batch[:] = self.given
        self.given += 1
        return self.batch

    def get_state(self):
        return {"given": self.given}

    def close(self):
        self.closed += 1


def test_a_device_a_spec_under_set_mesh_and_a_gspmd_sharding_are_taken():
    by_both = NamedSharding(MESH, PartitionSpec("data", "model"))
    gspmd = GSPMDSharding(by_both._device_assignment, by_both._to_xla_hlo_sharding(2))
    with jax.set_mesh(MESH):
        placed = {
            name: next(prefetch_to_mesh(numbered(1), {"x": sharding, "y": jax.devices()[3]}))
            for name, sharding in (("spec", PartitionSpec("data", "model")), ("gspmd", gspmd))
        }
    for batch in placed.values():
        assert batch["x"].sharding.is_equivalent_to(by_both, 2)
        assert batch["y"].devices() == {jax.devices()[3]}
        assert batch["x"].shape == (8, 4)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_batch_comes_in_order_on_its_sharding(prefetch):
    shardings = {"x": NamedSharding(MESH, PartitionSpec("data", "model")), "y": SHARDING}
    batches = list(prefetch_to_mesh(numbered(7), shardings, prefetch))
    for given, batch in zip(numbered(7), batches, strict=True):
        for name in ("x", "y"):
            assert batch[name].sharding == shardings[name]
            np.testing.assert_array_equal(np.asarray(batch[name]), given[name])
    assert batches[0]["y"].dtype == np.int32


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_that_reuses_its_memory_is_copied(prefetch):
    batches = list(prefetch_to_mesh(Reusing(6), SHARDING, prefetch))
    assert [np.unique(batch).tolist() for batch in batches] == [[i] for i in range(6)]


def aligned(rows, columns):
    """float32[rows, columns] at an address that the CPU backend can adopt."""
    raw = np.empty(rows * columns * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * columns * 4].view(np.float32).reshape(rows, columns)


def test_without_copy_the_cpu_backend_adopts_the_memory():
    mine = aligned(8, 64)
    mine[:] = 1
    for copy, seen in ((False, 2), (True, 1)):
        mine[:] = 1
        (batch,) = prefetch_to_mesh([mine], SHARDING, copy=copy)
        mine[:] = 2
        assert np.unique(batch).tolist() == [seen]


@pytest.mark.parametrize("copy", [True, False])
def test_leaves_on_devices_make_no_trip_through_the_host(copy, monkeypatch):
    """From each layout to each other one, beside leaves of NumPy; and a step may donate its batch."""
    two, back = Mesh(MESH.devices[:2], MESH.axis_names), Mesh(MESH.devices[::-1], MESH.axis_names)
    specs = [PartitionSpec("data"), PartitionSpec("data", "model"), PartitionSpec()]
    layouts = [NamedSharding(mesh, spec) for mesh in (MESH, two, back) for spec in specs]
    layouts.append(SingleDeviceSharding(jax.devices()[3]))
    on_the_host = []
    monkeypatch.setattr("feedline._src.drop_in.as_array", lambda name, leaf: on_the_host.append(name) or leaf)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    given = [x, *(jax.device_put(x, layout) for layout in layouts)]
    donating = jax.jit(lambda leaf: leaf + 0, donate_argnums=0)
    for to in layouts:
        with monkeypatch.context() as patches, jax.set_mesh(MESH):
            patches.setattr(type(given[1]), "_value", property(lambda _: pytest.fail("was read by the host")))
            batches = list(prefetch_to_mesh([given, given], to, prefetch=0, copy=copy))
        for leaf in itertools.chain(*batches):
            assert leaf.sharding == to
            np.testing.assert_array_equal(np.asarray(donating(leaf)), x)
    assert on_the_host == ["batch[0]"] * 2 * len(layouts)
    for leaf in given:
        np.testing.assert_array_equal(np.asarray(leaf), x)


def test_arrays_on_devices_whose_memory_the_iterator_uses_again_are_copied():
    memory = aligned(64, 1 << 14)

    def reusing():
        for i in range(40):
            memory[:] = i
            yield jnp.from_dlpack(memory)

    batches = prefetch_to_mesh(reusing(), jax.devices()[0], prefetch=5)
    assert [np.unique(batch).tolist() for batch in batches] == [[i] for i in range(40)]


def test_arrays_that_cannot_be_placed_are_named():
    deleted = jnp.ones(8)
    deleted.delete()
    for leaf in (jax.random.split(jax.random.key(0), 8), deleted):
        with pytest.raises(TypeError, match=r"batch\['k'\]: numpy\.asarray failed on this"):
            next(prefetch_to_mesh([{"k": leaf}], SHARDING))


def test_the_state_is_that_of_the_delivered_batch():
    source = Reusing(5)
    with prefetch_to_mesh(source, SHARDING, prefetch=5) as batches:
        assert batches.get_state() == {"given": 0}
        next(batches)
        arrived(source.exhausted)  # all five are placed
        assert batches.get_state() == {"given": 1}
        next(batches)
        assert batches.get_state() == {"given": 2}


@pytest.mark.parametrize("way", [copies.copy, copies.deepcopy, pickle.dumps])
def test_it_is_neither_copied_nor_pickled(way):
    with prefetch_to_mesh(numbered(3), SHARDING) as batches:
        next(batches)
        with pytest.raises(TypeError, match=r"can be neither pickled nor copied, .*; call prefetch_to_mesh again"):
            way(batches)
        with pytest.raises(TypeError, match="has no get_state"):
            batches.get_state()
        assert len(list(batches)) == 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_the_iterator_raises_comes_after_the_batches_before_it(prefetch):
    def failing():
        yield from numbered(3)
        raise ZeroDivisionError("third")

    batches = prefetch_to_mesh(failing(), SHARDING, prefetch)
    assert [int(next(batches)["x"][0, 0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="third"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_the_shapes_of_batches_may_change():
    source = [*numbered(2), *numbered(1, rows=16)]
    assert [batch["x"].shape for batch in prefetch_to_mesh(source, SHARDING)] == [(8, 4), (8, 4), (16, 4)]


def test_the_users_iterator_is_closed_once_started_or_not():
    for begun in (False, True):
        source = Reusing(5)
        batches = prefetch_to_mesh(source, SHARDING)
        if begun:
            next(batches)
        batches.close()
        batches.close()
        assert source.closed == 1
        with pytest.raises(ValueError, match="the iterator is closed"):
            next(batches)


def test_close_wakes_a_thread_that_waits():
    inside, go = threading.Event(), threading.Event()

    def waiting():
        inside.set()
        assert go.wait(PATIENCE_S)
        yield from numbered(1)

    batches = prefetch_to_mesh(waiting(), SHARDING)
    taken = spawn(lambda: next(batches))
    arrived(inside)
    with pytest.raises(ValueError, match="for one thread at a time, and another thread is inside it"):
        next(batches)
    batches.close(timeout_s=0)
    with pytest.raises(ValueError, match="the iterator is closed"):
        taken.result(PATIENCE_S)
    go.set()


def test_after_a_stall_the_next_call_waits_for_the_same_batch():
    goes_on = threading.Event()

    def slow():
        for batch in numbered(3):
            yield batch
            goes_on.wait()

    batches = prefetch_to_mesh(slow(), SHARDING)
    assert int(next(batches)["x"][0, 0]) == 0
    watch = batches._prefetcher._watch
    watch._reading = Reading(stall_warning_s=0.05, stall_error_s=0.1)
    with pytest.raises(StallError) as stalled:
        next(batches)
    watch._reading = Reading()
    assert stalled.value.__notes__ == [
        "feedline: call next again to go on waiting; prefetch_to_mesh has no such limit with prefetch=0"
    ]
    goes_on.set()
    assert [int(batch["x"][0, 0]) for batch in batches] == [1, 2]


@pytest.mark.parametrize("begun", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_an_interrupt_at_any_line_of_next_no_batch_is_missing(prefetch, begun):
    """Then `next` returns the batch that follows the state, or says that the iterator is closed. No call hangs."""

    def interrupted(batches, line):
        """Where `next` was interrupted, how many batches the state counts, and what the next `next` does."""
        where, _ = interrupted_at(line, lambda: next(batches))
        delivered = batches.get_state()["given"]
        try:
            return where, delivered, int(next(batches)[0, 0])
        except ValueError as error:
            return where, delivered, str(error)

    for line in range(1, 1000):
        source = Reusing(5)
        with prefetch_to_mesh(source, SHARDING, prefetch) as batches:
            for _ in range(begun):
                next(batches)
            where, delivered, found = spawn(functools.partial(interrupted, batches, line)).result(PATIENCE_S)
            if where is None:
                break
            assert found == delivered or "by an interrupt" in str(found), where
        assert source.closed == 1, where
    assert line > 20


def test_it_runs_where_transfers_are_forbidden():
    with jax.transfer_guard("disallow"):
        assert sum(1 for _ in prefetch_to_mesh(numbered(3), SHARDING)) == 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_its_report_and_statistics_tell_of_the_users_iterator(prefetch):
    def slow():
        for batch in numbered(40):
            time.sleep(0.01)
            yield batch

    with prefetch_to_mesh(slow(), SHARDING, prefetch) as batches:
        next(batches)
        with pytest.raises(ValueError, match=r"needs more batches .* this iterator has delivered 1 in all; call"):
            batches.report()
        for _ in batches:
            pass
        told, report = batches.statistics(), batches.report()
    assert (told.batches, told.rows, told.placed_bytes) == (40, 40 * 8, 40 * (8 * 4 * 4 + 8 * 4))
    assert told.read_s >= 40 * 0.01
    assert told.stage_s > 0 < told.place_s
    assert told.wait_s > 0.5 * told.read_s
    assert report.bound == "read"
    assert report.wait_share > 0.5
    assert report.settings["prefetch"] == prefetch
    if prefetch:
        assert report.advice.startswith("no setting helps: one thread reads a stream")
