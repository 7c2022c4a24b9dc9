"""One step and its metrics, against the chain rule and Adam written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mlp_oracle import loss_and_gradient, losses, made_up_rows, scores, weights_of
from mlp_tasks import task_of

from feedline._src.trainer.model import Sizes, as_features
from feedline._src.trainer.task import Task

SIZES = Sizes(features=64, classes=10, layers=2, width=32)


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_step_takes_the_gradient_of_the_rows_that_are_valid(layers):
    sizes = Sizes(features=64, classes=10, layers=layers, width=32)
    descent = task_of(sizes, optax.sgd(1.0))
    before, rows = jax.jit(descent.start)(), {**made_up_rows(32), "valid": np.arange(32) % 3 > 0}
    after, metrics = jax.jit(descent.update)(before, rows)
    expected_loss, expected = loss_and_gradient(weights_of(before.params), rows)
    assert float(metrics["loss"]) == pytest.approx(expected_loss, rel=1e-6)
    for old, new, slopes in zip(*map(weights_of, (before.params, after.params)), expected, strict=True):
        for a, b, slope in zip(old, new, slopes, strict=True):
            np.testing.assert_allclose(a - b, slope, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_batch_without_a_valid_row_has_no_gradient():
    descent = task_of(SIZES, optax.sgd(1.0))
    before = jax.jit(descent.start)()
    after, metrics = jax.jit(descent.update)(before, {**made_up_rows(8), "valid": np.zeros(8, bool)})
    assert float(metrics["loss"]) == 0
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before.params, after.params))


def test_metrics_against_the_oracle():
    tested = task_of(SIZES, optax.sgd(1.0))
    params = jax.jit(tested.start)().params
    rows = {**made_up_rows(100), "valid": np.arange(100) < 77}
    metrics, count = jax.jit(tested.measure)(params, rows)
    z = scores(weights_of(params), rows["image"][:77])
    assert int(count) == 77
    assert float(metrics["accuracy"]) == pytest.approx((z.argmax(axis=1) == rows["label"][:77]).mean(), rel=1e-6)
    assert float(metrics["loss"]) == pytest.approx(losses(z, rows["label"][:77]).mean(), rel=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16"])
def test_only_bytes_are_scaled(dtype):
    image = np.array([[[0, 1], [1, 0]]]).astype(dtype)
    expected = np.array([[0, 1, 1, 0]], np.float32) / (255 if dtype == "uint8" else 1)
    found = as_features(jnp.asarray(image))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (jnp.zeros(()), r"must return \(loss, metrics\).*; it returned \w*Array"),
        ((jnp.zeros(()),), r"it returned \(ArrayImpl\)"),
        ((jnp.zeros(()), jnp.zeros(())), r"it returned \(ArrayImpl, ArrayImpl\)"),
        ((jnp.zeros(4), {}), r"its loss has the shape \[4\]: take the mean over the rows"),
        ((jnp.zeros((), jnp.int32), {}), "its loss is int32"),
        ((jnp.zeros(()), {"accuracy": jnp.zeros(4)}), r"its accuracy has the shape \[4\]"),
        ((jnp.zeros(()), {"a": {"b": jnp.zeros(())}}), "its a is a dict: give each number a name of its own"),
        *(
            ((jnp.zeros(()), {name: jnp.zeros(())}), f"{name!r} is no string, or means something else in the hist")
            for name in ("loss", "step", "eval_x", 1)
        ),
    ],
)
def test_refused_losses(result, told):
    task = Task(lambda key: {"w": jnp.zeros(())}, lambda params, batch: result, optax.sgd(1.0))
    with pytest.raises(TypeError, match=told):
        task.update(task.start(), {"x": jnp.zeros(4)})
