"""`Feed(steps_per_call=K)`: K batches at once are those that a feed with K=1 delivers one by one."""

import itertools
import json

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline

N = 100
ROWS = {
    "x": np.random.default_rng(0).normal(size=(N, 3, 2)).astype(np.float32),
    "y": np.arange(N, dtype=np.int64),  # is cast to int32
    "z": np.arange(N * 8, dtype=np.uint8).reshape(N, 8),
}
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SHARDINGS = {
    "rows": NamedSharding(MESH, P("data")),
    "columns": {
        "x": NamedSharding(MESH, P("data")),
        "y": NamedSharding(MESH, P(("data", "model"))),
        "z": NamedSharding(MESH, P(None, "model")),
    },
    "one device": jax.sharding.SingleDeviceSharding(jax.devices()[2]),
    "replicated": NamedSharding(MESH, P()),
}


def feed_of(steps_per_call=1, source=ROWS, sharding="rows", batch_size=8, **options):
    return feedline.Feed(source, batch_size, SHARDINGS[sharding], steps_per_call=steps_per_call, **options)


def one_by_one(count, **options):
    with feed_of(**options) as feed:
        return [jax.tree.map(np.asarray, batch) for batch in itertools.islice(feed, count)]


def assert_same(batches, expected, k):
    """Each of `batches` holds the next k of `expected`."""
    assert len(batches) * k == len(expected)
    for i, batch in enumerate(batches):
        for step in range(k):
            mine = jax.tree.map(lambda leaf, step=step: np.asarray(leaf[step]), batch)
            jax.tree.map(np.testing.assert_array_equal, mine, expected[i * k + step])


def doubled(batch, rows):
    return {
        "x": batch["x"] * 2,
        "index": rows.index.astype(np.int32),
        "key": (rows.key >> np.uint64(40)).astype(np.int32),
    }


OPTIONS = [
    {},
    {"sharding": "columns"},
    {"sharding": "one device"},
    {"sharding": "replicated"},
    {"remainder": "pad"},
    {"remainder": "wrap"},
    {"order": feedline.Order(shuffle=False)},
    {"transform": doubled, "remainder": "pad"},
    {"prefetch": 0},
    {"reading": feedline.Reading(threads=8, buffer=1)},  # several threads share each batch
    {"source": grain.MapDataset.source([{"x": np.full(2, i)} for i in range(N)]).seed(1)},
]


@pytest.mark.parametrize(
    ("options", "k"),
    [*zip(OPTIONS, itertools.cycle([2, 5]), strict=False)],
    ids=[" ".join(options) or "default" for options in OPTIONS],
)
def test_the_batches_are_those_of_a_feed_with_one_step_a_call(options, k):
    expected = one_by_one(30, **options)  # over two ends of epochs
    with feed_of(k, **options) as feed:
        batches = list(itertools.islice(feed, 30 // k))
        assert_same(batches, expected, k)
        state = feed.get_state()
    with feed_of(**options) as single:
        list(itertools.islice(single, 30))
        assert state == single.get_state()


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_second_axis_is_sharded_as_the_batch_was(sharding):
    with feed_of(4, sharding=sharding) as feed, feed_of(sharding=sharding) as single:
        batch, one = next(feed), next(single)
        spec = feed.spec
    for leaf, alone, told in zip(*map(jax.tree.leaves, (batch, one, spec)), strict=True):
        assert leaf.shape == told.shape == (4, *alone.shape)
        assert leaf.sharding == told.sharding
        assert {shard.data.shape for shard in leaf.addressable_shards} == {
            (4, *shard.data.shape) for shard in alone.addressable_shards
        }
        for shard in leaf.addressable_shards:
            (beside,) = [other for other in alone.addressable_shards if other.device == shard.device]
            np.testing.assert_array_equal(shard.data[0], beside.data)


@pytest.mark.parametrize(("remainder", "before", "after"), [("drop", 1, 3), ("pad", 3, 1), ("wrap", 4, 3)])
def test_a_state_continues_with_another_number_of_steps(remainder, before, after):
    expected = one_by_one(36, remainder=remainder)
    with feed_of(before, remainder=remainder) as feed:
        for _ in range(12 // before):
            next(feed)
        state = json.loads(json.dumps(feed.get_state()))
        assert state["step"] == 12
    with feed_of(after, remainder=remainder) as feed:
        feed.set_state(state)
        batches = list(itertools.islice(feed, 24 // after))
    if after == 1:
        batches = [jax.tree.map(lambda leaf: leaf[None], batch) for batch in batches]
    assert_same(batches, expected[12:], after)


def test_counts_are_of_steps():
    with feed_of(3, epochs=1) as feed:
        assert (len(feed), feed.steps_per_epoch, feed.steps_per_call) == (4, 12, 3)
        rows = feed.rows_of(feed.get_state())
        batches = list(feed)
        assert (len(batches), feed.get_state()["step"]) == (4, 12)
        told = feed.statistics()
        assert (told.batches, told.rows, told.dropped_rows) == (12, 96, 4)
    np.testing.assert_array_equal(rows, batches[0]["y"])
    assert rows.shape == (3, 8)


@pytest.mark.parametrize("remainder", ["drop", "pad", "wrap"])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("k", range(1, 8))
def test_steps_that_do_not_divide_a_pass_are_refused(remainder, epochs, k):
    count = {"drop": 12 * epochs, "pad": 13 * epochs, "wrap": N * epochs // 8}[remainder]
    if count % k == 0:
        with feed_of(k, remainder=remainder, epochs=epochs) as feed:
            assert len(list(feed)) == len(feed) == count // k
            assert feed.get_state()["step"] == count
        return
    told = rf"steps_per_call={k} delivers {k} batches at once, .*: {count} are left from epoch 0, position 0; use"
    with pytest.raises(ValueError, match=told) as error:
        feed_of(k, remainder=remainder, epochs=epochs)
    works = int(str(error.value).partition("use steps_per_call=")[2].partition(",")[0])
    with feed_of(works, remainder=remainder, epochs=epochs) as feed:
        assert len(feed) * works == count


def test_a_place_from_which_they_do_not_divide_the_rest_is_refused():
    with feed_of(3, epochs=1) as feed:
        before = next(feed)["y"]
        with pytest.raises(ValueError, match=r"11 are left from epoch 0, position 8; use steps_per_call=1, or an"):
            feed.seek(0, 8)
        state = {**feed.get_state(), "position": 80}
        with pytest.raises(ValueError, match="2 are left from epoch 0, position 80"):
            feed.set_state(state)
        assert feed.get_state()["step"] == 3  # and the feed goes on
        assert next(feed)["y"].shape == before.shape


def test_bad_rows_are_masked_in_their_step():
    def read(i):
        if i % 10 == 7:
            raise ValueError("bad")
        return {"y": np.int64(i)}

    reading = feedline.Reading(bad_rows="mask", bad_rows_budget=0.1)
    order = feedline.Order(shuffle=False)
    options = {"source": grain.MapDataset.range(N).map(read), "reading": reading, "order": order}
    expected = one_by_one(12, **options)
    with feed_of(3, **options) as feed:
        batches = [next(feed) for _ in range(4)]
        assert feed.statistics().bad_rows == 9  # of 96 rows
    assert_same(batches, expected, 3)
    assert sum(int((~batch["valid"]).sum()) for batch in batches) == 9
