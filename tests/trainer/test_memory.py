"""What a loop holds is counted truly, each planted leak is found and named, and a sound loop is not blamed."""

import gc
import itertools
import logging
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline import Feed, FeedError
from feedline._src.trainer.memory import Growth, MemoryWatch, Snapshot, snapshot

STEPS = 60
SHARDED = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
REPLICATED = NamedSharding(SHARDED.mesh, P())


def watched(step, *, steps=STEPS, **options):
    """The watch after a loop over `step(i)`."""
    watch = MemoryWatch(every=2, warm_up=10, **{"on_growth": "ignore", **options})
    for i in range(steps):
        step(i)
        watch.after_step()
    return watch


def names(watch):
    return [growth.what for growth in watch.growths()]


def test_arrays_and_their_bytes_on_each_device_are_counted():
    gc.collect()
    before = snapshot()
    sharded = jax.device_put(np.zeros((96, 11), np.float32), SHARDED)
    replicated = jax.device_put(np.zeros((96, 11), np.int8), REPLICATED)
    after = snapshot()
    assert after.arrays["float32[96, 11]"] - before.arrays["float32[96, 11]"] == 1
    assert after.arrays["int8[96, 11]"] - before.arrays["int8[96, 11]"] == 1
    each = sharded.nbytes // 8 + replicated.nbytes
    assert [b - a for a, b in zip(before.device_bytes, after.device_bytes, strict=True)] == [each] * 8
    replicated.delete()
    assert snapshot().arrays["int8[96, 11]"] == before.arrays["int8[96, 11]"]


def test_a_list_of_results_is_found():
    kept = []
    watch = watched(lambda i: kept.append(jnp.full((3, 7), i)))
    (growth,) = watch.growths()
    assert (growth.what, growth.last - growth.first, growth.steps) == ("arrays int32[3, 7]", 50, 50)
    assert str(growth).endswith("in 50 steps, 1 a step")


def test_a_closure_that_keeps_each_batch_is_found():
    callbacks = []

    def step(i):
        batch = jax.device_put(np.full((16, 5), i, np.float32), SHARDED)
        callbacks.append(lambda: batch)

    assert names(watched(step)) == ["arrays float32[16, 5]"]


def test_a_metric_that_is_never_fetched_is_found():
    total = []
    loss = jax.jit(lambda x: (x * x).mean())

    def step(i):
        total.append(loss(jnp.arange(19.0)))

    assert names(watched(step)) == ["arrays float32[]"]


def test_host_memory_is_found_and_no_array_is_blamed():
    kept = []

    def step(i):
        kept.append(mmap.mmap(-1, 1 << 20))  # not from the allocator, which may still hold freed memory
        kept[-1].write(b"1" * (1 << 20))

    watch = watched(step)
    assert names(watch) == ["host"]
    (growth,) = watch.growths()
    assert 40 << 20 < growth.last - growth.first < 60 << 20


def test_a_sound_loop_over_a_feed_is_not_blamed():
    rows = {"x": np.zeros((4096, 64), np.float32)}
    step = jax.jit(lambda total, batch: total + batch["x"].sum(), donate_argnums=0)
    with Feed(rows, 64, SHARDED) as feed:
        total = jax.device_put(np.float32(0), REPLICATED)
        watch = MemoryWatch(feed, every=2, warm_up=10, on_growth="raise")
        for _, batch in zip(range(200), feed, strict=False):
            total = step(total, batch).block_until_ready()  # else steps may pile up, each with its batch
            watch.after_step()
        assert watch.growths() == []
        assert "host buffers" in watch.report()


def test_memory_that_only_varies_is_not_blamed():
    random, kept = np.random.default_rng(0), []

    def step(i):
        kept[:] = [jnp.zeros((2, 9)) for _ in range(random.integers(40))]

    assert names(watched(step)) == []


def test_arrays_of_many_shapes_are_told_from_memory_without_arrays(caplog):
    kept = []
    with caplog.at_level(logging.WARNING, "feedline"):
        watched(lambda i: kept.append(jnp.zeros(60_000 + i)), on_growth="warn")
    message = caplog.records[-1].getMessage()
    assert message.startswith("memory grows with the steps: device 0: ")
    assert message.endswith("Arrays are kept that have many shapes, or are kept only now and then")


def test_small_arrays_do_not_hide_large_ones_of_many_shapes():
    kept = []
    watch = watched(lambda i: kept.extend((jnp.zeros(60_000 + i), jnp.float32(i))))
    found = names(watch)  # on CPU devices, they may be seen to fill the memory of the host, too
    assert found[:2] == ["arrays float32[]", "device 0"]
    assert found[2:] in ([], ["host"])


def test_the_watch_itself_does_not_grow():
    kinds = [jnp.zeros((2, i)) for i in range(40)]
    watch = watched(lambda i: None, steps=3000)
    assert watch.growths() == []
    assert 64 <= len(watch._samples) <= 128
    assert len({b.step - a.step for a, b in itertools.pairwise(watch._samples)}) == 1
    del kinds


def test_growth_is_looked_for_at_ten_snapshots_and_whenever_their_steps_have_doubled(caplog):
    kept = []
    with caplog.at_level(logging.WARNING, "feedline"):
        watched(lambda i: kept.append(jnp.zeros((5, 13))), steps=10 + 2 * 39, on_growth="warn")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3  # 18, 36 and 72 steps after the warm-up
    assert "arrays float32[5, 13]: " in messages[-1]
    assert "72 steps, 1 a step. Something refers to these arrays: a list" in messages[-1]


def test_growth_as_an_error():
    kept = []
    with pytest.raises(FeedError, match=r"memory grows with the steps: arrays float32\[5, 17\]") as raised:
        watched(lambda i: kept.append(jnp.zeros((5, 17))), on_growth="raise")
    assert raised.value.stage == "train"
    assert len(kept) == 28  # the tenth snapshot


def test_the_report_has_a_column_for_each_moment():
    gc.collect()
    kept = []
    watch = watched(lambda i: kept.append(jnp.zeros((5, 19))))
    header, *lines = watch.report().splitlines()
    assert header.split("  ")[-1].strip() == "step 60"
    assert header.split() == ["start", "step", "10", "step", "60"]
    assert [line.split(",")[0] for line in lines[:8]] == [f"cpu {i}" for i in range(8)]
    assert lines[8].startswith("host, resident")
    warm, end = (int(number.replace(",", "")) for number in lines[9].split()[-2:])
    assert end - warm >= 40  # 50, and arrays of other tests may be freed meanwhile
    assert lines[10].startswith("arrays float32[5, 19]: ")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"warm_up": -1}, ValueError, "warm_up must be at least 0, got -1"),
        ({"every": 1.5}, TypeError, "every"),
        ({"on_growth": "stop"}, ValueError, "on_growth must be one of warn, raise, ignore, got 'stop'"),
    ],
)
def test_wrong_arguments(options, error, text):
    with pytest.raises(error, match=text):
        MemoryWatch(**options)


def test_few_snapshots_tell_nothing():
    kept = []
    watch = watched(lambda i: kept.append(jnp.zeros((5, 23))), steps=20)
    assert watch.growths() == []
    assert Growth("device 0", 1 << 20, 5 << 20, 4).__str__() == "device 0: 1 MiB → 5 MiB in 4 steps, 1 MiB a step"
    assert isinstance(snapshot(), Snapshot)
