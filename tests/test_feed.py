"""A feed delivers the rows that an oracle predicts, whatever is saved, restored, sought or prefetched."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from background import PATIENCE_S
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline import Feed, Order, Reading
from feedline._src.order.epoch import rows_at

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SHARDED = NamedSharding(MESH, P(("data", "model")))  # eight shards
WHOLE = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P())  # any batch size fits
SEED = 11
REMAINDERS = ["drop", "pad", "wrap"]


def source_of(n):
    rows = np.arange(n, dtype=np.int32)
    return {"row": rows, "x": np.stack([rows, rows**2], axis=1).astype(np.float32)}


def feed_of(n, batch_size, *, sharding=WHOLE, seed=SEED, **options):
    return Feed(source_of(n), batch_size, sharding, order=Order(seed), **options)


def rows_in(batch):
    """The rows that a batch holds, -1 where it is padded; its other leaves must agree."""
    rows = np.asarray(batch["row"])
    np.testing.assert_array_equal(np.asarray(batch["x"]), np.stack([rows, rows**2], axis=1).astype(np.float32))
    return np.where(np.asarray(batch.get("valid", True)), rows, -1).tolist()


def order_of(n, epoch, seed=SEED):
    return rows_at(Order(seed), n, epoch, np.arange(n)).tolist()


def expected_batches(n, batch_size, remainder, epochs):
    """Every batch of a pass, cut out of the epochs' orders with Python lists."""
    orders = [order_of(n, epoch) for epoch in epochs]
    if remainder == "wrap":
        orders = [list(itertools.chain(*orders))]
    batches = [order[i : i + batch_size] for order in orders for i in range(0, len(order), batch_size)]
    if remainder == "pad":
        return [batch + [-1] * (batch_size - len(batch)) for batch in batches]
    return [batch for batch in batches if len(batch) == batch_size]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize(("n", "batch_size"), [(40, 8), (43, 8), (13, 8), (8, 8), (5, 1)])
def test_a_pass_against_the_oracle(n, batch_size, remainder, epochs, prefetch):
    with feed_of(n, batch_size, remainder=remainder, epochs=epochs, prefetch=prefetch) as feed:
        expected = expected_batches(n, batch_size, remainder, range(epochs))
        assert len(feed) == len(expected)
        for rows in expected:
            assert feed.rows_of(feed.get_state()).tolist() == rows
            assert order_of(n, feed.epoch)[feed.position] == rows[0]
            assert rows_in(next(feed)) == rows
        following = expected_batches(n, batch_size, remainder, range(epochs, 2 * epochs))
        assert feed.rows_of(feed.get_state()).tolist() == following[0]
        assert next(feed, None) is None
        statistics = feed.statistics()
    real = sum(row >= 0 for batch in expected for row in batch)
    assert (statistics.batches, statistics.rows) == (len(expected), real)
    assert statistics.dropped_rows == n * epochs - real


@pytest.mark.parametrize(("remainder", "epochs"), [("pad", 2), ("wrap", 5)])
def test_a_batch_may_be_larger_than_an_epoch(remainder, epochs):
    with feed_of(13, 31, remainder=remainder, epochs=epochs) as feed:
        batches = list(feed)
    assert [rows_in(batch) for batch in batches] == expected_batches(13, 31, remainder, range(epochs))
    if remainder == "pad":  # padding repeats rows of the same epoch, so it causes no NaN
        order = order_of(13, 0)
        assert np.asarray(batches[0]["row"]).tolist() == [order[i % 13] for i in range(31)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_end_repeats_until_iter(prefetch):
    with feed_of(20, 8, epochs=2, prefetch=prefetch) as feed:
        assert len(list(feed)) == 4
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(feed)
        ended = feed.get_state()
        assert (feed.epoch, ended["epoch"], ended["position"], ended["step"]) == (1, 1, 16, 4)
        iter(feed)
        assert (feed.epoch, feed.position) == (2, 0)
        iter(feed)  # a second one changes nothing
        assert rows_in(next(feed)) == expected_batches(20, 8, "drop", [2])[0]
        assert feed.get_state()["step"] == 5


PEEKED = (
    r"goes on in the middle of a pass: 1 of its batches .* call feed.seek\(1\) before .* batches by next\(feed\)"
)


def test_a_loop_that_goes_on_in_the_middle_of_a_pass_warns():
    with feed_of(40, 8, epochs=1) as feed:
        list(feed)
        next(iter(feed))  # to look at a batch
        with pytest.warns(UserWarning, match=PEEKED) as caught:
            rest = [rows_in(batch) for batch in feed]
        assert caught[0].filename == __file__
        assert rest == expected_batches(40, 8, "drop", [1])[1:]

    with feed_of(40, 8, epochs=2) as feed:
        for _ in feed:
            break
        feed.seek(0)  # what the warning advises
        assert len(list(feed)) == 10


def test_what_goes_on_on_purpose_does_not_warn():
    with feed_of(40, 8, epochs=1) as feed:
        next(feed)  # a feed that is used as an iterator
        assert len(list(feed)) == 4
        iter(feed)
        assert len(list(feed)) == 5  # iter twice, and no batch between
        next(iter(feed))
        state = feed.get_state()
        feed.set_state(state)
        assert len(list(feed)) == 4  # a resume
        next(iter(feed))
        feed.seek(3, 8)
        assert len(list(feed)) == 4
        assert len(list(feed)) == 5
    with feed_of(40, 8) as feed:  # without an end
        for _ in range(3):
            assert len(list(zip(range(2), feed, strict=False))) == 2


def test_a_state_is_of_what_was_delivered_however_much_is_prefetched():
    with feed_of(43, 8, remainder="pad", epochs=1, prefetch=9) as feed:
        fresh = feed.get_state()
        taken = [rows_in(next(feed)), rows_in(next(feed))]
        for thread in feed._run._threads:
            thread.join(PATIENCE_S)  # until all batches are placed
        assert feed.statistics().ready == 4
        state = feed.get_state()
        assert [state[key] for key in ("version", "step", "epoch", "position")] == [1, 2, 0, 16]
        assert sorted(state) == ["epoch", "fingerprint", "position", "step", "version"]
        rest = [rows_in(batch) for batch in feed]
    assert taken + rest == expected_batches(43, 8, "pad", [0])
    for saved, left in ((fresh, taken + rest), (state, rest)):
        with feed_of(43, 8, remainder="pad", epochs=1) as resumed:
            resumed.set_state(json.loads(json.dumps(saved)))
            assert resumed.get_state() == saved
            assert [rows_in(batch) for batch in resumed] == left
            assert resumed.get_state()["step"] == 6


@pytest.mark.parametrize(
    ("field", "source", "seed"),
    [
        ("rows", source_of(44), SEED),
        ("order", source_of(43), 12),
        ("spec", {"row": np.arange(43)}, SEED),
        ("data", {**source_of(43), "row": np.arange(1, 44, dtype=np.int32)}, SEED),
    ],
)
def test_a_state_of_other_data_is_refused_and_changes_nothing(field, source, seed):
    with Feed(source, 8, WHOLE, order=Order(seed)) as saving:
        next(saving)
        state = saving.get_state()
    with feed_of(43, 8) as resumed:
        first = rows_in(next(resumed))
        with pytest.raises(ValueError, match=rf"the state was saved over other data: its '{field}' is .*allow=\("):
            resumed.set_state(state)
        assert [first, rows_in(next(resumed))] == expected_batches(43, 8, "drop", [0])[:2]
        resumed.set_state(state, allow=("rows", "spec", "data", "order"))
        assert (resumed.get_state()["step"], resumed.position) == (1, 8)


def test_seek_keeps_the_step_and_goes_anywhere():
    with feed_of(43, 8) as feed:
        next(feed)
        feed.seek(5)
        assert (feed.epoch, feed.position, feed.get_state()["step"]) == (5, 0, 1)
        assert rows_in(next(feed)) == order_of(43, 5)[:8]
        feed.seek(10**12, 3)
        assert rows_in(next(feed)) == order_of(43, 10**12)[3:11]
        feed.seek(0, 41)  # two rows are left: the next batch is the next epoch's
        assert (feed.epoch, feed.position) == (1, 0)
        assert rows_in(next(feed)) == order_of(43, 1)[:8]
        assert feed.get_state()["step"] == 4
        with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
            feed.seek(-1)
        with pytest.raises(TypeError, match=r"position must be an integer, got 1\.5"):
            feed.seek(0, 1.5)


@pytest.mark.parametrize("remainder", REMAINDERS)
def test_a_place_beyond_the_data_is_refused_and_changes_nothing(remainder):
    told = r"rows that came before it in its epoch, so it is at most 43, the end of the epoch; got 44\. feed\.seek"
    with feed_of(43, 8, remainder=remainder) as feed:
        delivered = [rows_in(next(feed))]
        beyond = {**feed.get_state(), "position": 44}
        for use in (lambda: feed.seek(0, 44), lambda: feed.set_state(beyond), lambda: feed.rows_of(beyond)):
            with pytest.raises(ValueError, match=told):
                use()
        delivered.append(rows_in(next(feed)))
        assert delivered == expected_batches(43, 8, remainder, [0])[:2]
        for go_to_the_end in (lambda: feed.seek(0, 43), lambda: feed.set_state({**beyond, "position": 43})):
            go_to_the_end()
            assert rows_in(next(feed)) == order_of(43, 1)[:8]


@pytest.mark.parametrize("remainder", REMAINDERS)
def test_statistics_are_a_snapshot_that_adds_up(remainder):
    with feed_of(43, 8, remainder=remainder, epochs=2, reading=Reading(threads=3)) as feed:
        before = feed.statistics()
        seen = [feed.statistics() for _ in feed]
        after = feed.statistics()
    assert (before.batches, before.rows, before.wait_s, before.threads, before.workers) == (0, 0, 0, 3, 0)
    assert [each.batches for each in seen] == [*range(1, len(seen) + 1)]
    for one, other in itertools.pairwise(seen):
        for name in ("rows", "dropped_rows", "read_s", "transform_s", "place_s", "wait_s"):
            assert getattr(one, name) <= getattr(other, name)
        assert 0 <= one.ready <= 2
    assert min(after.read_s, after.place_s, after.wait_s) > 0
    assert after.rows + after.dropped_rows == 86
    assert after.ready == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.rows = 0


def test_what_was_asked_for_can_be_read():
    with feed_of(40, np.int64(8), epochs=2, remainder="pad", prefetch=3, reading=Reading(buffer=4)) as feed:
        assert (feed.batch_size, type(feed.batch_size), feed.epochs, feed.remainder) == (8, int, 2, "pad")
        assert (feed.prefetch, feed.order, feed.reading.buffer) == (3, Order(SEED), 4)
        assert feed.reading.threads == feed.statistics().threads > 0
    with feed_of(40, 8) as feed:
        assert feed.epochs is None


def test_spec_is_that_of_the_batches():
    shardings = {"image": NamedSharding(MESH, P("data", "model")), "label": NamedSharding(MESH, P("data"))}
    source = {
        "image": np.zeros((40, 4, 3), np.uint8),
        "label": {"a": np.zeros(40, np.int64), "b": np.zeros((40, 2), np.float64)},
    }

    def transform(batch, rows):
        return {"image": batch["image"].astype(np.float16)[:, :, :2], "label": batch["label"]}

    with Feed(source, 16, shardings, remainder="pad", transform=transform) as feed:
        batch = next(feed)
        assert jax.tree.structure(feed.spec) == jax.tree.structure(batch)
        for told, leaf in zip(jax.tree.leaves(feed.spec), jax.tree.leaves(batch), strict=True):
            assert (told.shape, told.dtype, told.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
    assert jax.tree.map(lambda leaf: (leaf.dtype.name, leaf.shape), feed.spec) == {
        "image": ("float16", (16, 4, 2)),
        "label": {"a": ("int32", (16,)), "b": ("float32", (16, 2))},
        "valid": ("bool", (16,)),
    }
    assert feed.spec["valid"].sharding.spec == P("data")


def test_a_step_compiles_before_the_first_batch_and_takes_every_one():
    reads = []

    def transform(batch, rows):
        reads.append(len(rows.index))
        return batch

    def step(total, batch):
        return total + batch["row"].sum()

    with feed_of(48, 8, sharding=SHARDED, epochs=1, transform=transform) as feed:
        compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((), jnp.int32), feed.spec).compile()
        assert reads == [1, 1]  # two calls with one row each, to learn the transform's spec
        total = jnp.int32(0)
        for batch in feed:
            total = compiled(total, batch)  # takes no batch of another shape, dtype or sharding
    assert int(total) == sum(range(48))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
@pytest.mark.parametrize("where", ["thread", "everywhere"])
def test_a_training_loop_under_a_transfer_guard(level, prefetch, where):
    """The guard applies to this thread only, or to all threads, including the thread that places batches."""
    step = jax.jit(lambda total, batch: total + batch["row"].sum(), donate_argnums=0)
    total = jax.device_put(np.int32(0), NamedSharding(MESH, P()))
    with feed_of(48, 8, sharding=SHARDED, epochs=2, prefetch=prefetch, remainder="pad") as feed:
        jax.config.update("jax_transfer_guard", level if where == "everywhere" else None)
        try:
            with jax.transfer_guard(level):
                for batch in feed:
                    total = step(total, batch)
        finally:
            jax.config.update("jax_transfer_guard", None)
    assert int(total) == 2 * sum(range(48))


class Model:
    """A model of a feed, on plain integers: it takes rows one by one from epochs that are lists."""

    def __init__(self, n, remainder, epochs):
        self.n, self.remainder, self.epochs = n, remainder, epochs
        self.epoch = self.position = self.step = self.batches = 0
        self.exhausted = False

    def take(self, batch_size):
        """The rows of the next batch, -1 where padded; None at the end of the pass."""
        end = None if self.epochs is None else (self.epoch // self.epochs + 1) * self.epochs
        epoch, position = self.epoch, self.position
        enough = {"drop": batch_size, "pad": 1, "wrap": 0}[self.remainder]
        if self.n - position < enough:
            epoch, position = epoch + 1, 0
        rows = []
        while len(rows) < batch_size and epoch != end:
            if position < self.n:
                rows.append(order_of(self.n, epoch)[position])
                position += 1
            elif self.remainder == "pad":
                rows.append(-1)
                position += 1
            else:
                epoch, position = epoch + 1, 0
        if self.exhausted or len(rows) < batch_size:
            self.exhausted = True
            return None
        self.epoch, self.position = epoch, min(position, self.n)  # padding has no position
        self.step += 1
        self.batches += 1
        return rows

    def begin_pass(self):
        if self.exhausted:
            self.exhausted = False
            self.epoch, self.position = (self.epoch // (self.epochs or 1) + 1) * (self.epochs or 1), 0


class FeedMachine(RuleBasedStateMachine):
    """Does everything that a user may do to a feed and to its model, and compares the two."""

    feed = None

    @initialize(
        n=st.integers(1, 50),
        remainder=st.sampled_from(REMAINDERS),
        epochs=st.sampled_from([None, 1, 2, 3]),
        data=st.data(),
    )
    def begin(self, n, remainder, epochs, data):
        self.model = Model(n, remainder, epochs)
        self.saved = []
        self.build(data, None)

    def build(self, data, state):
        model = self.model
        largest = {"drop": model.n, "pad": 60, "wrap": model.n * (model.epochs or 3)}[model.remainder]
        self.batch_size = data.draw(st.integers(1, largest), label="batch_size")
        self.feed = feed_of(
            model.n,
            self.batch_size,
            remainder=model.remainder,
            epochs=model.epochs,
            prefetch=data.draw(st.integers(0, 3), label="prefetch"),
            reading=Reading(threads=data.draw(st.integers(0, 3), label="threads"), buffer=2),
        )
        model.batches = 0
        if state is not None:
            self.go_to(state)

    def go_to(self, state):
        """Restore a state, after a round trip through JSON."""
        self.feed.set_state(json.loads(json.dumps(state)))
        vars(self.model).update({name: state[name] for name in ("step", "epoch", "position")})
        self.model.exhausted = False

    @rule(count=st.integers(1, 5))
    def take(self, count):
        for _ in range(count):
            batch = next(self.feed, None)
            assert (None if batch is None else rows_in(batch)) == self.model.take(self.batch_size)
            state = self.feed.get_state()
            assert all(state[name] == getattr(self.model, name) for name in ("step", "epoch", "position"))
        assert self.feed.statistics().batches == self.model.batches

    @rule()
    def save(self):
        self.saved.append(self.feed.get_state())

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def rewind(self, data):
        self.go_to(data.draw(st.sampled_from(self.saved)))

    @rule(data=st.data())
    def resume_in_another_feed(self, data):
        state = self.feed.get_state()
        self.feed.close()
        self.build(data, state)

    @rule(epoch=st.integers(0, 4), position=st.integers(0, 60))
    def seek(self, epoch, position):
        if position > self.model.n:
            with pytest.raises(ValueError, match=rf"at most {self.model.n}, the end .* got {position}\."):
                self.feed.seek(epoch, position)
            return
        self.feed.seek(epoch, position)
        self.model.epoch, self.model.position, self.model.exhausted = epoch, position, False

    @rule()
    def iterate(self):
        iter(self.feed)
        self.model.begin_pass()

    def teardown(self):
        if self.feed is not None:
            self.feed.close()


TestAnythingAUserMayDo = pytest.mark.slow(pytest.mark.filterwarnings("ignore:this loop")(FeedMachine.TestCase))
TestAnythingAUserMayDo.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
