"""Slabs are used again, but never while anything can still read them."""

import errno
import functools
import gc
import itertools
import mmap
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from background import PATIENCE_S, spawn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from poison import PoisonedSource, poison

import feedline
from feedline._src.loader import staging
from feedline._src.loader.staging import Staging
from feedline._src.options import Order, Reading

FORM = [((8, 5), np.dtype(np.float32)), ((8,), np.dtype(np.int16))]


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setattr(staging._Return, "of", staticmethod(poison))


def address(array):
    return array.ctypes.data


def idle(stage):
    return [len(leaf) for leaf in stage._idle]


@pytest.mark.parametrize(
    "keep", [lambda a: a, lambda a: a[2:], lambda a: a.T[1], lambda a: a.view(np.uint8), memoryview]
)
def test_a_slab_is_leased_as_long_as_anything_refers_to_it(keep):
    stage = Staging(FORM, 2)
    kept = keep(stage.lease()[0])
    assert idle(stage) == [0, 1]
    del kept
    assert idle(stage) == [1, 1]


@given(st.lists(st.integers(-6, 3), max_size=60), st.integers(0, 4))
@settings(max_examples=200)
def test_leases_share_no_memory_and_idle_slabs_are_bounded(moves, most):
    """A move n ≥ 0 drops the n-th batch held, if there is one; a negative move leases one."""
    stage, held = Staging(FORM, most), []
    for move in moves:
        if move < 0:
            held.append(stage.lease())
        elif move < len(held):
            del held[move]
        addresses = [address(leaf) for leaves in held for leaf in leaves]
        assert len(set(addresses)) == len(addresses)
        assert max(idle(stage)) <= most
    assert stage.mapped <= 2 * sum(move < 0 for move in moves)


def test_threads_never_share_a_slab():
    stage, torn = Staging(FORM, 4), []

    def use(mine):
        for turn in range(500):
            leaves = stage.lease()
            for leaf in leaves:
                leaf[...] = mine
            if turn % 7 == mine:
                gc.collect(0)
            torn.extend(leaf for leaf in leaves if not (leaf == mine).all())

    threads = [spawn(functools.partial(use, i)) for i in range(6)]
    assert [thread.result(PATIENCE_S) for thread in threads] == [None] * 6
    assert not torn
    assert max(idle(stage)) <= 4
    assert stage.mapped < 6 * 500  # 2 * 6 * 500 were leased


def test_close_unmaps_idle_slabs_and_leased_ones_when_they_end():
    stage = Staging(FORM, 2)
    held = stage.lease()
    del stage.lease()[:]
    stage.close()
    stage.close()
    assert idle(stage) == [0, 0]
    del held
    assert idle(stage) == [0, 0]
    assert stage.lease()[0].shape == (8, 5)  # a pipeline that is ending may still lease


def test_slabs_that_were_unmapped_leave_nothing_behind():
    stage = Staging(FORM, 1)
    for _ in range(100):
        held = [stage.lease() for _ in range(3)]
        del held
    assert stage.mapped >= 2 * 100
    assert len(stage._mapped) == 2


def test_one_batch_that_is_held_keeps_no_slab_of_a_feed_that_nobody_closed():
    stage = Staging(FORM, 3)
    held = [stage.lease() for _ in range(3)]
    slabs = stage._mapped.copy()
    del held[1:], stage
    gc.collect()
    assert sum(slab() is not None for slab in slabs) == 2


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_batch_in_a_forked_child_stays_as_it_was():
    stage = Staging(FORM, 1)
    held = stage.lease()
    held[0][...] = 1
    ready, go = os.pipe()
    if not (child := os.fork()):
        os.read(ready, 1)
        os._exit(int(held[0].sum()) - 8 * 5)
    address_there = address(held[0])
    del held
    again = stage.lease()
    assert address(again[0]) == address_there
    again[0][...] = 2
    os.write(go, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(ready)
    os.close(go)


def test_a_kernel_without_huge_pages_is_fine(monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, option):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Mapping)
    assert Staging(FORM, 1).lease()[0].shape == (8, 5)


@pytest.mark.parametrize("change", [Staging.close, lambda stage: stage.keep(3)], ids=["close", "keep"])
def test_one_batch_that_is_held_keeps_no_other_slab_of_before_a_change(change):
    stage = Staging(FORM, 3)
    held = [stage.lease() for _ in range(3)]
    one_batch = stage.mapped_bytes / 3
    change(stage)
    del held[1:]
    assert stage.mapped_bytes == one_batch
    held[0] = stage.lease()
    assert stage.mapped_bytes == one_batch
    assert idle(stage) == [0, 0]


# -- in a feed that overwrites each slab as soon as its lease ends

BATCH = 16
ROWS = 96
SHAPES = {"aligned": (64,), "misaligned": (3,)}  # of float32 rows; shards begin at multiples of 64 bytes, or not


def mesh_of(devices):
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), PartitionSpec("data"))


def rows_of(shape, dtype=np.float32):
    return np.broadcast_to(np.arange(ROWS, dtype=dtype).reshape(-1, *[1] * len(shape)), (ROWS, *shape)).copy()


def expected(feed, shape):
    """The next batch, made from `feed.rows_of`."""
    return np.broadcast_to(feed.rows_of(feed.get_state()).reshape(-1, *[1] * len(shape)), (BATCH, *shape))


def changed(batch, rows):
    """A transform that returns new memory: the memory that is placed is not the memory that was read into."""
    return {"x": batch["x"] * 1.0}


USES = {
    "held": lambda x: x,
    "sliced": lambda x: x[3:7],
    "one shard": lambda x: x.addressable_shards[-1].data,
    "computed": jax.jit(lambda x: x + 0),
    "computed for long": jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.sin(y) * 0 + x, x)),
    "donated": jax.jit(lambda x: x + 0, donate_argnums=0),
    "as NumPy": np.asarray,
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("alignment", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"transform": changed}, {"prefetch": 0}], ids=["plain", "transform", "synchronous"]
)
def test_no_batch_is_ever_poisoned(devices, alignment, options):
    """Batches are used in all ways in turn; some results are dropped while others are kept."""
    shape = SHAPES[alignment]
    parts = {"sliced": slice(3, 7), "one shard": slice(-BATCH // devices, None)}
    kept = []
    feed = feedline.Feed({"x": rows_of(shape)}, BATCH, mesh_of(devices), epochs=20, **options)
    for turn, name in zip(range(len(feed)), itertools.cycle(USES), strict=False):
        wanted = expected(feed, shape)[parts.get(name, slice(None))]
        kept.append((USES[name](next(feed)["x"]), wanted, name))  # the batch itself is dropped, perhaps in use
        if turn >= 8 and turn % 8:
            assert_held(*kept.pop(0))
    feed.close()
    del feed
    gc.collect()
    for one in kept:  # these results outlive the feed
        assert_held(*one)


def assert_held(used, wanted, name):
    np.testing.assert_array_equal(used, wanted, name)


@pytest.mark.usefixtures("poisoned")
def test_no_batch_of_a_drop_in_is_ever_poisoned():
    given = (np.full((BATCH, 64), i, np.float32) for i in range(40))
    kept = [batch for i, batch in enumerate(feedline.prefetch_to_mesh(given, mesh_of(8))) if i % 3]
    for batch, i in zip(kept, [i for i in range(40) if i % 3], strict=True):
        np.testing.assert_array_equal(batch, np.full((BATCH, 64), i, np.float32))


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("alignment", SHAPES)
def test_no_batch_of_workers_is_ever_poisoned(alignment):
    source = PoisonedSource(ROWS, x=np.zeros(SHAPES[alignment], np.float32))
    with feedline.Feed(source, BATCH, mesh_of(8), epochs=2, reading=Reading(workers=2)) as feed:
        wanted = [feed.rows_of(state) for state in states_of(feed)]
        kept = [batch["x"] for batch in feed]
    for batch, rows in zip(kept, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(batch)[:, 0], rows)


def states_of(feed):
    """The states before each batch of the pass."""
    state = feed.get_state()
    steps = feed.steps_per_epoch
    return [{**state, "step": k, "epoch": k // steps, "position": k % steps * BATCH} for k in range(len(feed))]


def test_these_tests_detect_a_slab_that_is_idle_too_early(monkeypatch):
    def too_early(slab, lease, idle):
        back = staging._Return(lease)
        back.slab = slab
        idle.append(back)
        return back

    monkeypatch.setattr(staging._Return, "of", staticmethod(too_early))
    with feedline.Feed({"x": rows_of((64,))}, BATCH, mesh_of(8), epochs=2) as feed:
        wanted = [feed.rows_of(state) for state in states_of(feed)]
        kept = [batch["x"] for batch in feed]
    assert any((np.asarray(batch)[:, 0] != rows).any() for batch, rows in zip(kept, wanted, strict=True))


def test_aligned_shards_are_adopted_without_a_copy():
    source = {"x": rows_of((64,))}
    with feedline.Feed(source, BATCH, mesh_of(8), order=Order(shuffle=False), epochs=1) as feed:
        batch = next(feed)["x"]
        starts = [shard.data.unsafe_buffer_pointer() for shard in batch.addressable_shards]
    assert np.diff(starts).tolist() == [BATCH // 8 * 64 * 4] * 7  # one after the other, in one slab
    assert starts[0] % 4096 == 0


def test_a_long_pass_maps_no_more_slabs_than_the_formula_says():
    source = {"x": rows_of((64,)), "y": rows_of((), np.int32)}
    with feedline.Feed(source, BATCH, mesh_of(8), reading=Reading(threads=2, buffer=3), prefetch=2) as feed:
        for _ in zip(range(300), feed, strict=False):
            pass
        held = [next(feed) for _ in range(30)]
        assert feed.statistics().slabs <= 2 * (
            3 + 2 + 3 + 30 + 8
        )  # 8: a look at the devices may hold the latest batches
        del held
        assert max(idle(feed._stages.access.buffers.staging)) <= 3 + 2 + 3
