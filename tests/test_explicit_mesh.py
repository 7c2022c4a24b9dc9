"""Feeds, jitted steps and `fit` on meshes with Explicit axes, as `jax.make_mesh` makes them, and Auto axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
import feedline.trainer

ROWS = {"x": np.arange(960, dtype=np.float32).reshape(240, 4) / 960, "y": np.arange(240, dtype=np.int32) % 3}
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def on(kind, shape=(4, 2)):
    return NamedSharding(jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind)), P("data"))


def loss(params, batch):
    values = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params, batch["y"])
    return values.mean(), {}


@KINDS
@pytest.mark.parametrize("steps", [1, 2])
def test_a_jitted_step_takes_the_batches(kind, steps):
    sharding = on(kind)

    @jax.jit
    def train(params, batches):
        def step(params, batch):
            value, gradient = jax.value_and_grad(lambda p: loss(p, batch)[0])(params)
            return params - 0.1 * gradient, value

        return jax.lax.scan(step, params, batches) if steps > 1 else step(params, batches)

    params = jax.device_put(np.zeros((4, 3), np.float32), NamedSharding(sharding.mesh, P()))
    options = {"remainder": "pad", "with_place": True, "epochs": 1}
    with jax.set_mesh(sharding.mesh), feedline.Feed(ROWS, 24, sharding, steps_per_call=steps, **options) as feed:
        for batch in feed:
            batch = {name: batch[name] for name in ("x", "y")}
            params, values = train(params, batch)
    assert float(jnp.ravel(values)[-1]) < np.log(3)


@KINDS
def test_a_bare_spec_takes_the_mesh_that_is_set_and_a_feed_moves_to_another(kind):
    with jax.set_mesh(on(kind).mesh), feedline.Feed(ROWS, 24, P("data")) as feed:
        assert next(feed)["x"].sharding == on(kind)
        feed.move(on(kind, (2, 4)))
        assert next(feed)["x"].sharding == on(kind, (2, 4))


@KINDS
def test_prefetch_to_mesh_places_arrays_of_the_host_and_of_devices(kind):
    given = [np.ones((8, 4), np.float32), jnp.ones((8, 4)), jax.device_put(np.ones((8, 4), np.float32), on(kind))]
    placed = list(feedline.prefetch_to_mesh(given, on(kind)))
    assert [batch.sharding for batch in placed] == [on(kind)] * 3


@KINDS
@pytest.mark.parametrize("mode", ["jit_multi", "pmap"])
def test_fit_trains(kind, mode):
    with feedline.Feed(ROWS, 24, on(kind)) as feed:
        params = jnp.zeros((4, 3))
        fitted = feedline.trainer.fit(feed, lambda key: params, loss, optax.adam(0.1), mode=mode, steps=5)
    assert fitted.history[-1]["loss"] < np.log(3)
