"""`fit` against gradient descent written out in NumPy; resuming, evaluation, callbacks, bad losses."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline.trainer import fit, mesh_for

MODES = ["jit_single", "jit_multi", "pmap"]
RATE = 0.05
CHANCE = np.random.default_rng(0)
X = CHANCE.normal(size=(200, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3]) + 0.1 * CHANCE.normal(size=200)).astype(np.float32)
ORDER = feedline.Order(seed=5)


def init(key):
    return {"slope": jax.random.normal(key, (3,)), "shift": [jnp.zeros(())]}


def loss(params, batch):
    error = batch["x"] @ params["slope"] + params["shift"][0] - batch["y"]
    valid = batch.get("valid", jnp.ones(error.shape, bool))
    count = jnp.maximum(valid.sum(), 1)
    return jnp.where(valid, error**2, 0).sum() / count, {"distance": jnp.where(valid, abs(error), 0).sum() / count}


def feed_of(mode="jit_multi", rows=None, batch_size=24, **options):
    rows = rows or {"x": X, "y": Y}
    return feedline.Feed(rows, batch_size, NamedSharding(mesh_for(mode), P("data")), **{"order": ORDER, **options})


def fit_on(feed, mode="jit_multi", **options):
    with feed:
        return fit(feed, init, loss, optax.sgd(RATE), mode=mode, **options)


def descended(batches, seed=0):
    """Parameters after gradient descent, and the metrics of each step."""
    start = init(jax.random.key(seed))
    slope, shift, seen = np.asarray(start["slope"], np.float64), 0.0, []
    for x, y in batches:
        error = x.astype(np.float64) @ slope + shift - y
        seen.append({"loss": (error**2).mean(), "distance": abs(error).mean()})
        slope, shift = slope - RATE * 2 * (x.T @ error) / len(x), shift - RATE * 2 * error.mean()
    return slope, shift, seen


def rows_of_steps(steps, **options):
    """The rows of each step, read by another feed."""
    with feed_of(**options) as feed:
        for batch in itertools.islice(feed, steps):
            valid = np.asarray(batch["valid"]) if "valid" in batch else slice(None)
            yield np.asarray(batch["x"])[valid], np.asarray(batch["y"])[valid]


def test_the_result_is_shown_in_a_line():
    fitted = fit_on(feed_of(), steps=5)
    assert repr(fitted) == f"<Fitted: 4 parameters, 16 bytes, step 5, loss {fitted.progress.loss:.6g}>"


def test_a_resume_with_other_weights_says_to_give_a_phase(tmp_path):
    halves = {"a": {"x": X[:100], "y": Y[:100]}, "b": {"x": X[100:], "y": Y[100:]}}

    def train(weights, steps):
        rows = feedline.Mixture(halves, weights)
        return fit_on(feed_of(rows=rows, order=None), steps=steps, checkpoint_dir=tmp_path, save_every=5)

    old, new = {"a": 1, "b": 1}, {"a": 1, "b": 3}
    train(old, 5)
    with pytest.raises(
        ValueError,
        match=r"/5 is of other data: its 'order' is {'phases': \[\[0, {'a': 1, 'b': 1}\]\]}, this feed's is .*"
        r"\(120, new weights\)\]\), or another directory$",
    ):
        train(new, 6)
    assert train([(0, old), (5 * 24, new)], 6).progress.step == 6


@pytest.mark.parametrize("mode", MODES)
def test_it_descends_as_numpy_does(mode):
    fitted = fit_on(feed_of(mode), mode, steps=35, seed=4)
    slope, shift, seen = descended(rows_of_steps(35), seed=4)
    np.testing.assert_allclose(fitted.params["slope"], slope, rtol=1e-5)
    np.testing.assert_allclose(fitted.params["shift"][0], shift, rtol=1e-4)
    assert [entry["step"] for entry in fitted.history] == [1, 10, 20, 30, 35]
    for entry in fitted.history:
        expected = seen[entry["step"] - 1]
        assert entry == {
            "step": entry["step"],
            **{name: pytest.approx(expected[name], rel=1e-4) for name in expected},
        }
    assert (fitted.progress.step, fitted.progress.rows) == (35, 35 * 24)


@pytest.mark.parametrize("mode", MODES)
def test_padded_rows_weigh_nothing(mode):
    options = {"epochs": 2, "remainder": "pad"}  # 200 rows: the ninth batch holds 8, on two devices of eight
    fitted = fit_on(feed_of(mode, **options), mode)
    slope, _, _ = descended(rows_of_steps(18, **options))
    np.testing.assert_allclose(fitted.params["slope"], slope, rtol=1e-5)
    assert fitted.progress.step == 18


def test_a_batch_may_be_any_tree():
    def of_pair(params, batch):
        (x, y), _ = batch
        return jnp.mean((x @ params - y) ** 2), {}

    with feed_of(rows=((X, Y), {})) as feed:
        fitted = fit(feed, lambda key: jnp.zeros(3), of_pair, optax.sgd(RATE), steps=20)
    assert fitted.history[-1]["loss"] < 0.3 * fitted.history[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_has_the_parameters_and_history_of_one_that_never_stopped(mode, tmp_path):
    whole = fit_on(feed_of(mode), mode, steps=30)
    fit_on(feed_of(mode), mode, steps=17, checkpoint_dir=tmp_path, save_every=5)
    resumed = fit_on(feed_of(mode), mode, steps=30, checkpoint_dir=str(tmp_path))
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (resumed.progress.resumed, [entry["step"] for entry in resumed.history]) == (17, [18, 20, 30])
    assert resumed.history[1:] == whole.history[-2:]
    again = fit_on(feed_of(mode), mode, steps=30, checkpoint_dir=tmp_path)
    assert (again.progress.resumed, again.progress.rows, again.history) == (30, 0, [])
    np.testing.assert_array_equal(again.params["slope"], whole.params["slope"])


def test_an_optimizer_with_a_random_key_resumes(tmp_path):
    def noisy(steps, **options):
        optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(RATE))
        with feed_of() as feed:
            return fit(feed, init, loss, optimizer, steps=steps, **options)

    noisy(3, checkpoint_dir=tmp_path)
    np.testing.assert_array_equal(noisy(6, checkpoint_dir=tmp_path).params["slope"], noisy(6).params["slope"])


def test_epochs_are_counted_over_resumes(tmp_path):
    stopped = fit_on(feed_of(epochs=3), checkpoint_dir=tmp_path, after_step=lambda step: step == 11)
    assert stopped.progress.step == 11
    assert fit_on(feed_of(epochs=3), checkpoint_dir=tmp_path).progress.step == 24
    assert fit_on(feed_of(epochs=3), checkpoint_dir=tmp_path).progress.rows == 0


def mean_metrics(params, x, y):
    error = x @ np.asarray(params["slope"]) + np.asarray(params["shift"][0]) - y
    return {"loss": (error**2).mean(), "distance": abs(error).mean()}


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_counts_each_row_once_and_stands_in_the_history(mode):
    kept = []
    with feed_of(mode, rows={"x": X[:90], "y": Y[:90]}, order=None, epochs=1, remainder="pad") as test:
        fitted = fit_on(feed_of(mode), mode, steps=25, evaluation=test, evaluate_every=10, callbacks=[kept.append])
        tested = fitted.evaluate(test)
        other = fitted.evaluate(test, lambda params, batch: (jnp.mean(batch["valid"]), {"two": 2.0}))
    with feed_of(mode, epochs=1) as unpadded:
        assert fitted.evaluate(unpadded).rows == 192
    assert tested.rows == 90
    assert tested.metrics == pytest.approx(mean_metrics(fitted.params, X[:90], Y[:90]), rel=1e-4)
    assert other.metrics["two"] == 2
    evaluated = {entry["step"]: entry for entry in fitted.history if "eval_loss" in entry}
    assert list(evaluated) == [10, 20]
    slope, shift, _ = descended(rows_of_steps(20))
    expected = mean_metrics({"slope": slope, "shift": [shift]}, X[:90], Y[:90])
    assert evaluated[20]["eval_loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert [(progress.step, *progress.metrics.values()) for progress in kept] == [
        tuple(entry.values()) for entry in fitted.history
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_loss_names_its_step_and_rows_and_keeps_the_last_good_checkpoint(mode, tmp_path):
    x = X.copy()
    x[77, 1] = np.nan
    feed = feed_of(mode, rows={"x": x, "y": Y}, batch_size=8)
    with feed:
        states = [feed.get_state()]
        for _ in range(40):
            next(feed)
            states.append(feed.get_state())
        rows = [feed.rows_of(state).tolist() for state in states[:-1]]
    step = next(i for i, of_step in enumerate(rows) if 77 in of_step) + 1
    for _ in range(2):  # from the beginning, and from the checkpoint
        with pytest.raises(feedline.FeedError) as told:
            fit_on(
                feed_of(mode, rows={"x": x, "y": Y}, batch_size=8),
                mode,
                steps=100,
                checkpoint_dir=tmp_path,
                save_every=1,
            )
        assert f"the loss is nan at step {step}, the first" in str(told.value)
        assert "values that are not finite, in batch['x'] of the training rows 77;" in str(told.value)
        assert (told.value.epoch, told.value.position) == (0, 8 * (step - 1))
        assert max(int(path.name) for path in tmp_path.glob("[0-9]*")) == step - 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_several_steps_a_call_are_the_same_steps(mode, tmp_path):
    """Five steps a call, then four, resumed from a checkpoint between two epochs, against one step a call."""
    options = {"evaluate_every": 20, "mode": mode}
    with feed_of(mode, epochs=1, remainder="pad") as test:
        whole = fit_on(feed_of(mode), steps=40, evaluation=test, **options)
        first = fit_on(
            feed_of(mode, steps_per_call=5), steps=20, checkpoint_dir=tmp_path, evaluation=test, **options
        )
        rest = fit_on(
            feed_of(mode, steps_per_call=4), steps=40, checkpoint_dir=tmp_path, evaluation=test, **options
        )
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(rest.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert (first.progress.step, first.progress.rows, rest.progress.resumed) == (20, 20 * 24, 20)
    by_step = {entry["step"]: entry for entry in whole.history}
    assert [entry["step"] for entry in first.history] == [5, 10, 20]
    assert [entry["step"] for entry in rest.history] == [24, 32, 40]
    for entry in [*first.history[1:], rest.history[-1]]:
        assert entry == pytest.approx(by_step[entry["step"]], rel=1e-4)


def test_a_bad_loss_names_every_row_at_fault_and_leaves_the_feed_where_it_was():
    x, y = X.copy(), Y.copy()
    order = feedline.Order(shuffle=False)
    x[[35, 37, 60], 1], y[36] = np.inf, np.nan
    sizes = [(0, 8), (2, 16)]  # step 3 has rows 16 to 31, step 4 rows 32 to 47
    with feed_of(rows={"x": x, "y": y, "n": np.arange(200)}, batch_size=sizes, order=order) as feed:
        with pytest.raises(
            feedline.FeedError, match=r"step 4, .* in batch\['x'\], batch\['y'\] of the training"
        ) as told:
            fit(feed, init, loss, optax.sgd(RATE), steps=6)
        assert " of the training rows 35, 36, 37; " in str(told.value)
        assert (feed.get_state()["step"], feed.position) == (6, 2 * 8 + 4 * 16)
        assert next(feed)["n"][0] == 2 * 8 + 4 * 16


def test_a_bad_gradient_is_traced_to_the_step_before():
    """The loss masks the value, but its gradient is 0 × nan."""
    y = np.ones(200, np.float32)
    y[21] = np.nan

    def masked(params, batch):
        return jnp.where(jnp.isnan(batch["y"]), 0, params * batch["y"]).sum(), {}

    told = r"nan at step 4, .* have values that are not finite, in batch\['y'\] of the training rows 21;"
    feed = feed_of(rows={"y": y}, batch_size=8, order=feedline.Order(shuffle=False))
    with feed, pytest.raises(feedline.FeedError, match=told):
        fit(feed, lambda key: jnp.ones(()), masked, optax.sgd(RATE), steps=8)


def test_a_bad_step_of_a_call_does_not_blame_the_steps_after_it():
    x = X.copy()
    x[[41, 60], 1] = np.nan  # of steps 6 and 8: both in the second call
    told = r"nan at step 6, .* in batch\['x'\] of the training rows 41;"
    options = {"batch_size": 8, "order": feedline.Order(shuffle=False), "steps_per_call": 4}
    with feed_of(rows={"x": x, "y": Y}, **options) as feed, pytest.raises(feedline.FeedError, match=told):
        fit(feed, init, loss, optax.sgd(RATE), steps=8)


@pytest.mark.parametrize("per_call", [1, 4])
def test_finite_rows_of_a_bad_loss_are_said_to_be_finite(per_call):
    told = r"that step holds the training rows (\d+, ){8}… \(24\); all values of it and of the step before are"
    with feed_of(steps_per_call=per_call) as feed, pytest.raises(feedline.FeedError, match=told):
        fit(feed, init, loss, optax.sgd(1e30), steps=20)


def test_a_bad_loss_is_told_and_the_feed_put_back_if_its_batch_cannot_be_read():
    x, ended = X.copy(), []
    x[77, 1] = np.nan

    def transform(batch, rows):
        if ended:
            raise OSError("gone")
        return batch

    def end(step):
        ended.extend([step] if step == 24 else [])

    told = r"training rows .*; its values could not be read again \(OSError: gone\)"
    with feed_of(rows={"x": x, "y": Y}, batch_size=8, transform=transform, prefetch=0) as feed:
        with pytest.raises(feedline.FeedError, match=told):
            fit(feed, init, loss, optax.sgd(RATE), steps=24, report_every=99, after_step=end)
        assert (feed.get_state()["step"], feed.get_state()["position"]) == (24, 24 * 8)


def test_steps_to_do_that_the_calls_do_not_divide_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"steps_per_call=4 batches at once, which must divide .*: 30 are left"):
        fit_on(feed_of(steps_per_call=4), steps=30)
    fit_on(feed_of(), steps=10, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"which must divide .*: 30 are left to step 40"):
        fit_on(feed_of(steps_per_call=4), steps=40, checkpoint_dir=tmp_path)
    assert fit_on(feed_of(steps_per_call=4), steps=42, checkpoint_dir=tmp_path).progress.step == 42
    assert fit_on(feed_of(steps_per_call=4), steps=41, checkpoint_dir=tmp_path).progress.step == 42  # none to do


@pytest.mark.slow
@pytest.mark.parametrize(("every", "per_call"), [(1, 1), (3, 1), (20, 10), (10, 4)])
def test_no_evaluation_is_lost_however_close_they_are(every, per_call):
    steps = 40
    with feed_of(epochs=1, remainder="pad") as test:
        fitted = fit_on(
            feed_of(steps_per_call=per_call),
            steps=steps,
            report_every=1 if per_call == 1 else every,
            evaluation=test,
            evaluate_every=every,
        )
        last = fitted.evaluate(test)
    seen = [entry["step"] for entry in fitted.history if "eval_loss" in entry]
    calls = range(per_call, steps + 1, per_call)
    assert seen == [step for step in calls if (step - per_call) // every != step // every]
    assert fitted.history[-1].get("eval_loss", last.metrics["loss"]) == pytest.approx(last.metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(("per_call", "step"), [(1, 1), (1, 31), (4, 10), (4, 11), (7, 29), (7, 30)])
def test_the_first_bad_loss_is_found_in_any_call(per_call, step):
    bad = np.where(np.arange(56) == step - 1, np.nan, 1).astype(np.float32)
    rows = {"x": np.repeat(bad, 8)[:, None], "y": np.zeros(448, np.float32)}
    feed = feed_of(rows=rows, batch_size=8, steps_per_call=per_call, order=feedline.Order(shuffle=False))

    def forgets(params, batch):
        return jnp.mean(batch["x"]) + 0 * params.sum(), {}

    with feed, pytest.raises(feedline.FeedError, match=f"the loss is nan at step {step}, the first") as told:
        fit(feed, lambda key: jnp.zeros(2), forgets, optax.sgd(0.0), steps=56)
    assert told.value.position == (step - 1) // per_call * per_call * 8
    assert f"the training rows {8 * (step - 1)}, " in str(told.value)


def test_parameters_that_are_not_finite_are_neither_saved_nor_returned(tmp_path):
    """The loss of the last step is finite, its gradient is not."""

    def root(params, batch):
        return jnp.sqrt(jnp.maximum(params.sum(), 0)), {}

    for _ in range(2):
        with (
            feed_of() as feed,
            pytest.raises(feedline.FeedError, match="the parameters are not finite after step 1, "),
        ):
            fit(
                feed,
                lambda key: jnp.zeros(3),
                root,
                optax.sgd(1.0),
                steps=1,
                checkpoint_dir=tmp_path,
                save_every=1,
            )
        assert list(tmp_path.glob("[0-9]*")) == []


def test_nothing_is_saved_after_a_bad_loss_that_the_optimizer_skipped(tmp_path):
    x = X.copy()
    x[:] = 1
    rows = {"x": x, "y": Y}
    with feed_of(rows=rows, batch_size=8) as feed:
        second = [feed.rows_of({**feed.get_state(), "position": 8})]
    x[second[0][0], 0] = np.nan
    for _ in range(2):
        with feed_of(rows=rows, batch_size=8) as feed, pytest.raises(feedline.FeedError, match="nan at step 2, "):
            fit(feed, init, loss, optax.apply_if_finite(optax.sgd(RATE), 5), steps=24, report_every=50,
                checkpoint_dir=tmp_path, save_every=4)  # fmt: skip
        assert list(tmp_path.glob("[0-9]*")) == []


@pytest.mark.parametrize("mode", ["jit_multi", "pmap"])
def test_float16_parameters_do_not_overflow_in_the_average(mode):
    def steep(params, batch):
        return jnp.mean(8 * params * batch["y"].astype(jnp.float16), dtype=jnp.float32), {}

    rows = {"y": np.ones(131_072, np.float32)}
    with feed_of(mode, rows, batch_size=131_072) as feed:
        fitted = fit(feed, lambda key: jnp.zeros((), jnp.float16), steep, optax.sgd(1.0), mode=mode, steps=1)
    assert float(fitted.params) == -8


@pytest.mark.parametrize("valid", [np.ones(200, np.float32), np.ones((200, 5), bool), np.ones(200, np.int8)])
def test_a_leaf_valid_that_is_not_about_padding_is_refused(valid):
    with pytest.raises(TypeError, match=r'the leaf "valid" tells rows from padding, bool \[24\], and here it is'):
        fit_on(feed_of(rows={"x": X, "y": Y, "valid": valid}), steps=1)


def test_a_loss_that_counts_padding_is_warned_of(caplog):
    def forgets(params, batch):
        return jnp.mean(params["slope"].sum() * batch["y"]), {}

    with feed_of(epochs=1, remainder="pad") as feed:
        fitted = fit(feed, init, forgets, optax.sgd(0.0), steps=1)
        assert "the loss does not use it, so these rows count; take means with" in caplog.text
        caplog.clear()
        with feed_of(epochs=1, remainder="pad") as test:
            fitted.evaluate(test, loss)
            assert caplog.text == ""
            fitted.evaluate(test)
    assert "these rows count" in caplog.text
    caplog.clear()
    fit_on(feed_of(epochs=1, remainder="pad"), steps=1)
    fit_on(feed_of(), steps=1)
    assert caplog.text == ""


def test_complex_parameters_descend():
    z = (CHANCE.normal(size=(200, 2)) + 1j * CHANCE.normal(size=(200, 2))).astype(np.complex64)
    target = np.complex64([1 + 2j, -1j])

    def distance(params, batch):
        error = batch["z"] @ params - batch["t"]
        return jnp.mean(jnp.abs(error) ** 2), {}

    with feed_of(rows={"z": z, "t": z @ target}) as feed:
        fitted = fit(feed, lambda key: jnp.zeros(2, jnp.complex64), distance, optax.sgd(0.1), steps=200)
    np.testing.assert_allclose(fitted.params, target, atol=1e-3)


def test_an_evaluation_begins_at_the_first_row():
    with feed_of(rows={"x": X[:90], "y": Y[:90]}, epochs=1, remainder="pad") as test:
        fitted = fit_on(feed_of(), steps=3)
        next(test)  # as after an evaluation that was interrupted
        assert fitted.evaluate(test).rows == 90
        assert fitted.evaluate(test).rows == 90


def test_steps_beyond_the_end_of_the_feed_are_warned_of(caplog):
    assert fit_on(feed_of(epochs=1), steps=100).progress.step == 8
    assert "training ended after step 8 of 100, because the feed ended" in caplog.text
    caplog.clear()
    fit_on(feed_of(epochs=1), steps=8)
    assert caplog.text == ""


def test_a_resumed_feed_need_not_be_an_iterator(tmp_path):
    class Iterable:
        def __init__(self, feed):
            self.feed = feed
            self.spec, self.get_state, self.set_state = feed.spec, feed.get_state, feed.set_state

        def __iter__(self):
            return iter(self.feed)

    for steps in (3, 6):
        with feed_of() as feed:
            fitted = fit(Iterable(feed), init, loss, optax.sgd(RATE), steps=steps, checkpoint_dir=tmp_path)
    assert (fitted.progress.resumed, fitted.progress.step) == (3, 6)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"init": "model"}, "init must be a function, got 'model'"),
        (
            {"init": {}},
            "init must be a function of a key that gives the parameters, and dict is a module or a tree",
        ),
        ({"init": nnx.Linear(3, 1, rngs=nnx.Rngs(0))}, "and Linear is a module or a tree; docs/training.md shows"),
        ({"init": linen.Dense(1)}, "and Dense is a module or a tree"),
        ({"init": lambda key: linen.Dense(1)}, "arrays, and params is Dense, which a gradient cannot change"),
        ({"loss": None}, "loss must be a function, got None"),
        ({"optimizer": optax.sgd}, "optimizer must be an optax transformation"),
        ({"optimizer": 0.1}, "optimizer must be an optax transformation such as .*, got 0.1"),
        ({"callbacks": print}, "callbacks must be a list of functions of a Progress"),
        ({"after_step": 3}, "after_step must be a function, got 3"),
        (
            {"init": lambda key: {"layers": [jnp.zeros(3), jax.nn.relu]}},  # as a module of Equinox has it
            r"arrays, and params\['layers'\]\[1\] is custom_jvp, .* = eqx\.partition\(module, ",
        ),
        (
            {"init": lambda key: {"a": [jnp.zeros((), int)]}},
            r"params\['a'\]\[0\] is int32, which a gradient cannot change",
        ),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(arguments, told):
    given = {"init": init, "loss": loss, "optimizer": optax.sgd(RATE), "steps": 1, **arguments}
    with feed_of() as feed, pytest.raises(TypeError, match=told):
        fit(feed, **given)


def test_a_bad_loss_of_a_stream_names_its_step(tmp_path):
    import grain

    items = grain.MapDataset.source([{"x": X[i], "y": Y[i] * (math.nan if i == 30 else 1)} for i in range(200)])
    with pytest.raises(feedline.FeedError, match=r"the loss is nan at step 4, .*extreme values, or lower the"):
        fit_on(feed_of(rows=items.to_iter_dataset(), batch_size=8, order=None), steps=10)


def test_after_step_sees_every_step_and_may_end_training():
    seen = []
    fitted = fit_on(feed_of(), steps=50, after_step=lambda step: seen.append(step) or step == 13)
    assert (seen, fitted.progress.step, fitted.history[-1]["step"]) == (list(range(1, 14)), 13, 13)
    assert fitted.stopped
    assert not fit_on(feed_of(), steps=5, after_step=lambda step: None).stopped


def test_the_feed_goes_on_where_training_ended():
    with feed_of() as feed:
        fitted = fit(feed, init, loss, optax.sgd(RATE), steps=7)
        assert (fitted.progress.step, feed.get_state()["step"]) == (7, 7)
        assert fit(feed, init, loss, optax.sgd(RATE), steps=7).progress.step == 7
        assert feed.get_state()["step"] == 14


def test_a_loss_may_hold_constants():
    """Tracing may move them to the devices; the steps after it may not move anything."""
    target = np.float32([1, 2, 3])

    def to_target(params, batch):
        return jnp.mean((jnp.array([1.0, 1.0, 1.0]) * params - jnp.asarray(target)) ** 2), {}

    with feed_of() as feed:
        fitted = fit(feed, lambda key: jnp.zeros(3), to_target, optax.sgd(1.0), steps=30)
    np.testing.assert_allclose(fitted.params, target, rtol=1e-3)


def test_metrics_that_are_python_numbers_or_integers():
    def counted(params, batch):
        return jnp.mean(params * batch["y"]), {"one": 1, "rows": jnp.int32(3), "half": 0.5}

    with feed_of() as feed:
        fitted = fit(feed, lambda key: jnp.ones(()), counted, optax.sgd(0.0), steps=2)
    assert {name: fitted.history[0][name] for name in ("one", "rows", "half")} == {
        "one": 1,
        "rows": 3,
        "half": 0.5,
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "a feed with epochs=None would never end; give steps"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 5, "report_every": 0}, "report_every must be at least 1"),
        ({"steps": 5, "save_every": -1}, "save_every must be at least 1"),
        ({"steps": 5, "evaluate_every": 10}, "evaluation and evaluate_every go together"),
        ({"steps": 5, "mode": "jit"}, "mode must be one of jit_single, jit_multi, pmap"),
        ({"steps": 5, "mode": "jit_single"}, "trains on one device, but the batches lie on 8"),
    ],
)
def test_refused_arguments(options, told):
    with pytest.raises(ValueError, match=told):
        fit_on(feed_of(), **options)


def test_refused_evaluations():
    fitted_before = fit_on(feed_of(), steps=1)
    with (
        feed_of(epochs=1) as finite,
        feed_of() as endless,
        feed_of("jit_single", epochs=1) as one_device,
        feed_of(epochs=2) as twice,
        feed_of(epochs=1, steps_per_call=4) as several,
    ):
        with pytest.raises(ValueError, match="an evaluation feed with epochs=None would never end"):
            fit_on(feed_of(), steps=5, evaluation=endless, evaluate_every=10)
        with pytest.raises(ValueError, match="one by one; build it with steps_per_call=1"):
            fitted_before.evaluate(several)
        with pytest.raises(ValueError, match="epochs=2 counts each row several times; build it with epochs=1"):
            fitted_before.evaluate(twice)
        with pytest.raises(ValueError, match="the evaluation would take the rows of the training"):
            fit(finite, init, loss, optax.sgd(RATE), steps=5, evaluation=finite, evaluate_every=10)
        with pytest.raises(ValueError, match=r"a multiple of report_every.*got 15 and 10"):
            fit_on(feed_of(), steps=5, evaluation=finite, evaluate_every=15)
        fitted = fit_on(feed_of(), steps=5)
        with pytest.raises(ValueError, match="evaluation feed must be on the devices of the training feed"):
            fitted.evaluate(one_device)


def test_refused_feeds(tmp_path):
    with pytest.raises(TypeError, match=r"feed must be a feedline.Feed, or have its spec: .*; got list"):
        fit([], init, loss, optax.sgd(RATE), steps=5)
    with feed_of() as feed, feed_of() as other:

        class Batches:
            spec = feed.spec

            def __iter__(self):
                return iter(feed)

        assert fit(Batches(), init, loss, optax.sgd(RATE), steps=5).progress.step == 5
        with pytest.raises(ValueError, match="checkpoints need a feed that can be restored, but Batches has no"):
            fit(Batches(), init, loss, optax.sgd(RATE), steps=5, checkpoint_dir=tmp_path)
        with pytest.raises(
            ValueError, match="trainer has done 0 and the feed has delivered 5; begin with a new feed"
        ):
            fit(feed, init, loss, optax.sgd(RATE), steps=5, checkpoint_dir=tmp_path)
        assert fit(other, init, loss, optax.sgd(RATE), steps=5, checkpoint_dir=tmp_path).progress.step == 5
