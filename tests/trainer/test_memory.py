"""What a loop holds is counted truly, each planted leak is found and named, and a sound loop is not blamed."""

import gc
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline import Feed, FeedError
from feedline._src.trainer.memory import MemoryWatch, held

STEPS = 60
SHARDED = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
REPLICATED = NamedSharding(SHARDED.mesh, P())


def watched(step, *, steps=STEPS, **options):
    """The watch after a loop over `step(i)`."""
    gc.collect()  # what earlier tests left must not be freed during the loop
    watch = MemoryWatch(every=2, warm_up=10, **{"on_growth": "ignore", **options})
    for i in range(steps):
        step(i)
        watch.after_step()
    return watch


def test_arrays_and_their_bytes_on_each_device_are_counted(monkeypatch):
    live = jax.live_arrays  # arrays of other tests may be freed at any time
    monkeypatch.setattr(jax, "live_arrays", lambda: [array for array in live() if array.shape == (96, 11)])
    sharded = jax.device_put(np.zeros((96, 11), np.float32), SHARDED)
    replicated = jax.device_put(np.zeros((96, 11), np.int8), REPLICATED)
    found = held()
    assert (found["arrays float32[96, 11]"], found["arrays int8[96, 11]"]) == (1, 1)
    assert [found[f"device {i}"] for i in range(8)] == [sharded.nbytes // 8 + replicated.nbytes] * 8
    replicated.delete()
    assert "arrays int8[96, 11]" not in held()


def kept_by_a_closure(i, kept):
    batch = jax.device_put(np.full((16, 5), i, np.float32), SHARDED)
    kept.append(lambda: batch)


def never_fetched(i, kept):
    kept.append(jax.jit(lambda x: (x * x).mean())(jnp.arange(19.0)))


@pytest.mark.parametrize(("leak", "what"), [(kept_by_a_closure, "float32[16, 5]"), (never_fetched, "float32[]")])
def test_arrays_that_are_kept_are_named(leak, what):
    kept = []
    watch = watched(lambda i: leak(i, kept))
    (growth,) = watch.growths()
    assert (growth.what, growth.last - growth.first, growth.steps) == (f"arrays {what}", 48, 48)
    assert str(growth).endswith("in 48 steps, 1 a step")


def test_host_memory_is_found_and_no_array_is_blamed():
    kept = []

    def step(i):
        kept.append(mmap.mmap(-1, 1 << 20))  # not from the allocator, which may still hold freed memory
        kept[-1].write(b"1" * (1 << 20))

    (growth,) = watched(step).growths()
    assert growth.what == "host"
    assert 40 << 20 < growth.last - growth.first < 60 << 20


def test_a_sound_loop_over_a_feed_is_not_blamed():
    rows = {"x": np.zeros((4096, 64), np.float32)}
    step = jax.jit(lambda total, batch: total + batch["x"].sum(), donate_argnums=0)
    with Feed(rows, 64, SHARDED) as feed:
        total = jax.device_put(np.float32(0), REPLICATED)
        watch = MemoryWatch(feed, every=2, warm_up=10, on_growth="raise")
        for _, batch in zip(range(200), feed, strict=False):
            total = step(total, batch).block_until_ready()  # so no steps pile up, each with its batch
            watch.after_step()
        assert watch.growths() == []


def test_memory_that_only_varies_is_not_blamed():
    random, kept = np.random.default_rng(0), []

    def step(i):
        kept[:] = [jnp.zeros((2, 9)) for _ in range(random.integers(40))]

    assert watched(step).growths() == []


def test_a_feed_without_statistics_is_refused():
    with pytest.raises(TypeError, match=r"^feed must have a method statistics\(\), .* got \[\]"):
        MemoryWatch([])


def test_growth_as_an_error_at_the_tenth_sample():
    kept = []
    with pytest.raises(FeedError, match=r"memory grows with the steps: arrays float32\[5, 17\]") as raised:
        watched(lambda i: kept.append(jnp.zeros((5, 17))), on_growth="raise")
    assert (raised.value.stage, len(kept)) == ("train", 28)
