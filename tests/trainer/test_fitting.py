"""`fit` against gradient descent written out in NumPy; resuming, evaluation, callbacks, bad losses."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
        assert f"holds the training rows {', '.join(map(str, rows[step - 1]))}; look" in str(told.value)
        assert (told.value.epoch, told.value.position) == (0, 8 * (step - 1))
        assert max(int(path.name) for path in tmp_path.glob("[0-9]*")) == step - 1


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


def test_a_bad_loss_inside_a_call_names_its_own_step_and_rows():
    x = X.copy()
    x[77, 1] = np.nan
    rows = {"x": x, "y": Y}
    with feed_of(rows=rows, batch_size=8) as feed:
        each = [feed.rows_of(feed.get_state())]
        for _ in range(24):
            next(feed)
            each.append(feed.rows_of(feed.get_state()))
    step = next(i for i, of_step in enumerate(each) if 77 in of_step) + 1
    for per_call in (1, 3, 5):
        with pytest.raises(feedline.FeedError) as told:
            fit_on(feed_of(rows=rows, batch_size=8, steps_per_call=per_call), steps=60)
        assert f"at step {step}, the first" in str(told.value)
        assert f"the training rows {', '.join(map(str, each[step - 1]))}; look" in str(told.value)


def test_steps_that_the_calls_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="steps must be a multiple of the feed's steps_per_call, 4, got 30"):
        fit_on(feed_of(steps_per_call=4), steps=30)


def test_a_bad_loss_of_a_stream_names_its_step(tmp_path):
    import grain

    items = grain.MapDataset.source([{"x": X[i], "y": Y[i] * (math.nan if i == 30 else 1)} for i in range(200)])
    with pytest.raises(feedline.FeedError, match=r"the loss is nan at step 4, .*extreme values, or lower the"):
        fit_on(feed_of(rows=items.to_iter_dataset(), batch_size=8, order=None), steps=10)


def test_gradients_that_overflow_are_told():
    with feed_of() as feed, pytest.raises(feedline.FeedError, match=r"the loss is (nan|inf) at step"):
        fit(feed, init, loss, optax.sgd(1e30), steps=20)


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
    with feed_of(epochs=1) as finite, feed_of() as endless, feed_of("jit_single", epochs=1) as one_device:
        with pytest.raises(ValueError, match="an evaluation feed with epochs=None would never end"):
            fit_on(feed_of(), steps=5, evaluation=endless, evaluate_every=10)
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
            ValueError, match=r"needs the feed at step 0, as the parameters are, but it .*delivered 5"
        ):
            fit(feed, init, loss, optax.sgd(RATE), steps=5, checkpoint_dir=tmp_path)
        assert fit(other, init, loss, optax.sgd(RATE), steps=5, checkpoint_dir=tmp_path).progress.step == 5


def test_a_feed_without_a_batch_is_refused():
    class NoBatches:
        def __init__(self, spec):
            self.spec = spec

        def __iter__(self):
            return iter(())

    with feed_of() as feed, pytest.raises(ValueError, match="training needs at least one batch"):
        fit(NoBatches(feed.spec), init, loss, optax.sgd(RATE), steps=5)
