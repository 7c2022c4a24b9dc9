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
from feedline.trainer import fit, mean_of_valid, mesh_for

MODES = ["jit_single", "jit_multi", "pmap"]
RATE = 0.05
CHANCE = np.random.default_rng(0)
X = CHANCE.normal(size=(200, 3)).astype(np.float32)
Y = (X @ np.float32([1, -2, 3]) + 0.1 * CHANCE.normal(size=200)).astype(np.float32)
ORDER, IN_ORDER = feedline.Order(seed=5), feedline.Order(shuffle=False)


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


def fit_on(feed, mode="jit_multi", init=init, loss=loss, optimizer=optax.sgd(RATE), **options):  # noqa: B008
    with feed:
        return fit(feed, init, loss, optimizer, mode=mode, **options)


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
        assert entry == pytest.approx({"step": entry["step"], **seen[entry["step"] - 1]}, rel=1e-4)
    assert (fitted.progress.step, fitted.progress.rows) == (35, 35 * 24)
    assert repr(fitted) == f"<Fitted: step 35, loss {fitted.progress.loss:.6g}>"


@pytest.mark.parametrize("mode", MODES)
def test_padded_rows_weigh_nothing(mode):
    options = {"epochs": 2, "remainder": "pad"}  # 200 rows: the ninth batch has 8, on 2 of 8 devices
    fitted = fit_on(feed_of(mode, **options), mode)
    slope, _, _ = descended(rows_of_steps(18, **options))
    np.testing.assert_allclose(fitted.params["slope"], slope, rtol=1e-5)
    assert fitted.progress.step == 18


def test_batches_and_parameters_may_be_any_trees():
    def of_pair(params, batch):
        (x, y), _ = batch
        # Python numbers and integers are metrics, too; tracing may move constants to the devices
        return jnp.mean((x @ params - y) ** 2 + jnp.asarray(np.float32(0))), {"one": 1, "rows": jnp.int32(3)}

    fitted = fit_on(feed_of(rows=((X, Y), {})), init=lambda key: jnp.zeros(3), loss=of_pair, steps=20)
    assert fitted.history[-1]["loss"] < 0.3 * fitted.history[0]["loss"]
    assert (fitted.history[0]["one"], fitted.history[0]["rows"]) == (1, 3)


def test_complex_parameters_descend():
    z = (CHANCE.normal(size=(200, 2)) + 1j * CHANCE.normal(size=(200, 2))).astype(np.complex64)
    target = np.complex64([1 + 2j, -1j])

    def distance(params, batch):
        return jnp.mean(jnp.abs(batch["z"] @ params - batch["t"]) ** 2), {}

    feed, start = feed_of(rows={"z": z, "t": z @ target}), jnp.zeros(2, jnp.complex64)
    fitted = fit_on(feed, init=lambda key: start, loss=distance, optimizer=optax.sgd(0.1), steps=200)
    np.testing.assert_allclose(fitted.params, target, atol=1e-3)


@pytest.mark.parametrize("mode", ["jit_multi", "pmap"])
def test_float16_parameters_do_not_overflow_in_the_average(mode):
    def steep(params, batch):
        return jnp.mean(8 * params * batch["y"].astype(jnp.float16), dtype=jnp.float32), {}

    feed, start = (
        feed_of(mode, {"y": np.ones(131_072, np.float32)}, batch_size=131_072),
        jnp.zeros((), jnp.float16),
    )
    fitted = fit_on(feed, mode, init=lambda key: start, loss=steep, optimizer=optax.sgd(1.0), steps=1)
    assert float(fitted.params) == -8


# --- resuming ---


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


def test_a_run_without_a_step_to_do_gives_the_saved_parameters(tmp_path):
    before = fit_on(feed_of(), steps=3, checkpoint_dir=tmp_path)
    again = fit_on(feed_of(), steps=3, checkpoint_dir=tmp_path)
    assert (again.progress.resumed, again.progress.rows, again.history) == (3, 0, [])
    assert repr(again) == "<Fitted: step 3, no step was left to do>"
    np.testing.assert_array_equal(again.params["slope"], before.params["slope"])


def test_an_optimizer_with_a_random_key_resumes(tmp_path):
    def noisy(steps, **options):
        optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(RATE))
        return fit_on(feed_of(), optimizer=optimizer, steps=steps, **options)

    noisy(3, checkpoint_dir=tmp_path)
    np.testing.assert_array_equal(noisy(6, checkpoint_dir=tmp_path).params["slope"], noisy(6).params["slope"])


def test_a_resume_with_other_weights_says_to_give_a_phase(tmp_path):
    halves = {"a": {"x": X[:100], "y": Y[:100]}, "b": {"x": X[100:], "y": Y[100:]}}

    def train(weights, steps):
        rows = feedline.Mixture(halves, weights)
        return fit_on(feed_of(rows=rows, order=None), steps=steps, checkpoint_dir=tmp_path, save_every=5)

    old, new = {"a": 1, "b": 1}, {"a": 1, "b": 3}
    train(old, 5)
    with pytest.raises(
        ValueError,
        match=r"made with other data: its 'order' is {'phases': \[\[0, {'a': 1, 'b': 1}\]\]}, this feed's is .*"
        r"\(120, new weights\)\]\), or another directory$",
    ):
        train(new, 6)
    assert train([(0, old), (5 * 24, new)], 6).progress.step == 6


def test_any_iterable_with_a_spec_trains_and_with_a_state_resumes(tmp_path):
    class Batches:
        def __init__(self, feed):
            self.feed, self.spec = feed, feed.spec

        def __iter__(self):
            return iter(self.feed)

    class Resumable(Batches):
        def __init__(self, feed):
            super().__init__(feed)
            self.get_state, self.set_state = feed.get_state, feed.set_state

    for steps in (3, 6):
        with feed_of() as feed:
            fitted = fit(Resumable(feed), init, loss, optax.sgd(RATE), steps=steps, checkpoint_dir=tmp_path / "a")
    assert (fitted.progress.resumed, fitted.progress.step) == (3, 6)
    with feed_of() as feed:
        assert fit(Batches(feed), init, loss, optax.sgd(RATE), steps=5).progress.step == 5
        assert (
            fit(feed, init, loss, optax.sgd(RATE), steps=7).progress.step == 7
        )  # the feed continues where training ended
        assert feed.get_state()["step"] == 12
        with pytest.raises(TypeError, match="the feed's state, and Batches has no get_state or set_state; train"):
            fit(Batches(feed), init, loss, optax.sgd(RATE), steps=5, checkpoint_dir=tmp_path / "b")
        with pytest.raises(ValueError, match="trainer has done 0 and the feed has delivered 12; begin with a new"):
            fit(feed, init, loss, optax.sgd(RATE), steps=5, checkpoint_dir=tmp_path / "b")


def test_steps_beyond_the_end_of_the_feed_are_warned_of(caplog):
    assert fit_on(feed_of(epochs=1), steps=100).progress.step == 8
    assert "training ended after step 8 of 100, because the feed ended" in caplog.text
    caplog.clear()
    fit_on(feed_of(epochs=1), steps=8)
    assert "training ended" not in caplog.text


# --- evaluation ---


def mean_metrics(params, x, y):
    error = x @ np.asarray(params["slope"]) + np.asarray(params["shift"][0]) - y
    return {"loss": (error**2).mean(), "distance": abs(error).mean()}


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_counts_each_row_once_and_stands_in_the_history(mode):
    kept = []
    with feed_of(mode, rows={"x": X[:90], "y": Y[:90]}, order=None, epochs=1, remainder="pad") as test:
        fitted = fit_on(feed_of(mode), mode, steps=25, evaluation=test, evaluate_every=10, callbacks=[kept.append])
        next(iter(test))  # as after an evaluation that was interrupted
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
    assert [{"step": progress.step, **progress.metrics} for progress in kept] == fitted.history


def test_an_evaluation_that_leaves_out_rows_warns():
    told = r'leaves out 18 of 90 rows, which do not fill a batch; build its feed with remainder="pad"'
    with feed_of(rows={"x": X[:90], "y": Y[:90]}, epochs=1) as test, pytest.warns(UserWarning, match=told):
        assert fit_on(feed_of(), steps=1).evaluate(test).rows == 72


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
    seen = [entry["step"] for entry in fitted.history if "eval_loss" in entry]
    calls = range(per_call, steps + 1, per_call)
    assert seen == [step for step in calls if (step - per_call) // every != step // every]


def test_a_mean_needs_one_value_for_each_row():
    batch = {"valid": jnp.array([True, True, False])}
    for values, of in (((3, 1), batch), ((1,), batch), ((3, 2), {})):
        with pytest.raises(
            ValueError, match=r"one value for each row, \[[3B]\], got .*; average over the other axes"
        ):
            mean_of_valid(jnp.ones(values), of)


def test_a_loss_that_counts_padding_is_warned_of(caplog):
    def forgets(params, batch):
        return jnp.mean(params["slope"].sum() * batch["y"]), {}

    for of, warned in ((forgets, True), (loss, False)):
        caplog.clear()
        fit_on(feed_of(epochs=1, remainder="pad"), loss=of, steps=1)
        assert ("the loss does not use it, so these rows count; take means with" in caplog.text) == warned


# --- several steps a call ---


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_several_steps_a_call_are_the_same_steps(mode, tmp_path):
    """Five steps a call, then four, resumed from a checkpoint between two epochs, against one step a call."""
    with feed_of(mode, epochs=1, remainder="pad") as test:
        options = {"evaluate_every": 20, "mode": mode, "evaluation": test}
        whole = fit_on(feed_of(mode), steps=40, **options)
        first = fit_on(feed_of(mode, steps_per_call=5), steps=20, checkpoint_dir=tmp_path, **options)
        rest = fit_on(feed_of(mode, steps_per_call=4), steps=40, checkpoint_dir=tmp_path, **options)
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(rest.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert (first.progress.step, first.progress.rows, rest.progress.resumed) == (20, 20 * 24, 20)
    by_step = {entry["step"]: entry for entry in whole.history}
    assert [entry["step"] for entry in first.history] == [5, 10, 20]
    assert [entry["step"] for entry in rest.history] == [24, 32, 40]
    for entry in [*first.history[1:], rest.history[-1]]:
        assert entry == pytest.approx(by_step[entry["step"]], rel=1e-4)


def test_steps_to_do_that_the_calls_do_not_divide_are_refused(tmp_path):
    fit_on(feed_of(), steps=10, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"steps_per_call=4 batches .* must divide .* steps, 30 up to step 40"):
        fit_on(feed_of(steps_per_call=4), steps=40, checkpoint_dir=tmp_path)
    assert fit_on(feed_of(steps_per_call=4), steps=42, checkpoint_dir=tmp_path).progress.step == 42
    assert fit_on(feed_of(steps_per_call=4), steps=41, checkpoint_dir=tmp_path).progress.step == 42  # none is left


# --- losses that are not finite ---


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_loss_names_its_step_and_rows_and_keeps_the_last_good_checkpoint(mode, tmp_path):
    rows = {"x": np.where(np.arange(600).reshape(200, 3) == 77 * 3 + 1, np.float32(np.nan), X), "y": Y}
    with feed_of(mode, rows=rows, batch_size=8) as feed:
        taken = [feed.rows_of({**feed.get_state(), "position": 8 * step}).tolist() for step in range(25)]
    step = next(i for i, of_step in enumerate(taken) if 77 in of_step) + 1
    for _ in range(2):  # from the beginning, and from the checkpoint
        with pytest.raises(feedline.FeedError, match=f"the loss is nan at step {step}, the first") as told:
            fit_on(feed_of(mode, rows=rows, batch_size=8), mode, steps=100, checkpoint_dir=tmp_path, save_every=1)
        assert f"in the training rows {', '.join(map(str, taken[step - 1]))} of that step" in str(told.value)
        assert (told.value.epoch, told.value.position) == (0, 8 * (step - 1))
        assert max(int(path.name) for path in tmp_path.glob("[0-9]*")) == step - 1


@pytest.mark.parametrize(
    ("per_call", "step"),
    [(1, 2), (4, 11), *(pytest.param(*of, marks=pytest.mark.slow) for of in ((1, 31), (4, 10), (7, 29), (7, 30)))],
)
def test_the_first_bad_loss_is_found_in_any_call(per_call, step):
    sizes, first = (8, 8 * (step - 1)) if per_call > 1 else ([(0, 16), (1, 8)], 8 * step)
    rows = {"x": np.where(np.arange(456) >= first, np.nan, 1).astype(np.float32)[:, None]}
    feed = feed_of(rows=rows, batch_size=sizes, steps_per_call=per_call, order=IN_ORDER)

    def forgets(params, batch):
        return jnp.mean(batch["x"]) + 0 * params.sum(), {}

    with pytest.raises(feedline.FeedError, match=f"the loss is nan at step {step}, the first") as told:
        fit_on(feed, init=lambda key: jnp.zeros(2), loss=forgets, steps=56)
    assert told.value.position == first // (per_call * 8) * per_call * 8
    assert f"the training rows {first}, " in str(told.value)


def test_a_bad_loss_of_a_stream_names_its_step():
    import grain

    items = grain.MapDataset.source([{"x": X[i], "y": Y[i] * (math.nan if i == 30 else 1)} for i in range(200)])
    with pytest.raises(feedline.FeedError, match=r"the loss is nan at step 4, .* values in the rows of that step"):
        fit_on(feed_of(rows=items.to_iter_dataset(), batch_size=8, order=None), steps=10)


def test_parameters_that_are_not_finite_are_neither_saved_nor_returned(tmp_path):
    """The loss of the last step is finite, its gradient is not."""

    def root(params, batch):
        return jnp.sqrt(jnp.maximum(params.sum(), 0)), {}

    with pytest.raises(feedline.FeedError, match="the loss of step 1 is finite, but the parameters after "):
        fit_on(feed_of(), init=lambda key: jnp.zeros(3), loss=root, steps=1, checkpoint_dir=tmp_path, save_every=1)
    assert list(tmp_path.glob("[0-9]*")) == []


def test_nothing_is_saved_after_a_bad_loss_that_the_optimizer_skipped(tmp_path):
    x = np.where(np.arange(200)[:, None] == 11, np.float32(np.nan), np.float32(1) + 0 * X)  # NaN in step 2
    feed, skips = feed_of(rows={"x": x, "y": Y}, batch_size=8, order=IN_ORDER), optax.apply_if_finite
    with pytest.raises(feedline.FeedError, match="nan at step 2, "):
        fit_on(feed, optimizer=skips(optax.sgd(RATE), 5), steps=24, report_every=50, checkpoint_dir=tmp_path,
               save_every=4)  # fmt: skip
    assert list(tmp_path.glob("[0-9]*")) == []


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"init": {}}, "init must be a function of a key, got the module or tree dict; docs/training"),
        ({"init": nnx.Linear(3, 1, rngs=nnx.Rngs(0))}, "tree Linear"),
        ({"init": linen.Dense(1)}, "tree Dense"),
        ({"init": lambda key: linen.Dense(1)}, "arrays: params is Dense, which a gradient cannot change"),
        ({"init": lambda key: {"a": [jnp.zeros((), int)]}}, r"params\['a'\]\[0\] is int32, which a gradient"),
        ({"init": lambda key: [jax.nn.relu]}, r"params\[0\] is custom_jvp, .* eqx\.partition\(module, "),
        ({"optimizer": optax.adam}, r"optimizer must be an optax transformation, such as .*, got function"),
        ({"callbacks": print}, r"callbacks must be a list of functions, got builtin_.*; give \[callback\]"),
        ({"callbacks": (each for each in [print])}, "callbacks must be a list of functions, got generator"),
    ],
)
def test_arguments_of_a_wrong_type(arguments, told):
    with pytest.raises(TypeError, match=told):
        fit_on(feed_of(), steps=1, **arguments)
    with pytest.raises(TypeError, match=r"fit trains on a feedline\.Feed, got list; give"):
        fit([{}], init, loss, optax.sgd(RATE), steps=1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "a feed with epochs=None would never end; give steps"),
        ({"steps": 5, "checkpoint_dir": "gs://a/b"}, "need a folder of the file system, got gs:/a/b; give a"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 5, "report_every": 0}, "report_every must be at least 1"),
        ({"steps": 5, "save_every": -1}, "save_every must be at least 1"),
        ({"steps": 5, "evaluate_every": 10}, "evaluation and evaluate_every go together, and eval"),
        ({"steps": 5, "mode": "jit"}, "mode must be one of jit_single, jit_multi, pmap"),
        ({"steps": 5, "mode": "jit_single"}, "trains on one device, but the batches lie on 8"),
    ],
)
def test_refused_arguments(options, told):
    with pytest.raises(ValueError, match=told):
        fit_on(feed_of(), **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "an evaluation feed with epochs=None would never end"),
        ({"epochs": 2}, "epochs=2 counts each row several times; build it with epochs=1"),
        ({"epochs": 1, "steps_per_call": 4}, "one by one; build it with steps_per_call=1"),
        ({"epochs": 1}, r"a multiple of report_every.*got 15 and 10"),
    ],
)
def test_refused_evaluations(options, told):
    with feed_of(**options) as test, pytest.raises(ValueError, match=told):
        fit_on(feed_of(), steps=5, evaluation=test, evaluate_every=15)
