"""Training in several processes takes the same steps as in one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline._src.order.epoch import rows_at

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .layouts import sharding_of

pytestmark = pytest.mark.slow

STEPS, SIZE, RATE, N = 20, 16, 0.1, 100
FEATURES = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)
TARGETS = FEATURES @ np.arange(5, dtype=np.float32) + np.float32(0.5)


@case(["data", "permuted", "model_across"])
def losses(here, layout):
    """The losses before each step of gradient descent on a linear model."""
    sharding = sharding_of(layout, here.devices)
    descent = optax.sgd(RATE)

    def loss_of(weights, batch):
        return jnp.mean((batch["features"] @ weights["slope"] + weights["offset"] - batch["target"]) ** 2)

    @jax.jit
    def step(weights, state, batch):
        loss, gradient = jax.value_and_grad(loss_of)(weights, batch)
        updates, state = descent.update(gradient, state)
        return optax.apply_updates(weights, updates), state, loss

    @jax.jit(out_shardings=NamedSharding(sharding.mesh, P()))
    def start():
        weights = {"slope": jnp.zeros(5), "offset": jnp.zeros(())}
        return weights, descent.init(weights)

    seen = []
    weights, state = start()
    with feedline.Feed({"features": FEATURES, "target": TARGETS}, batch_size=SIZE, sharding=sharding) as feed:
        for _, batch in zip(range(STEPS), feed, strict=False):
            weights, state, loss = step(weights, state, batch)
            seen.append(float(loss))
    return seen


def losses_by_numpy():
    """The same losses in NumPy, by the chain rule, over rows in the default order of a feed."""
    slope, offset = np.zeros(5), 0.0
    steps = N // SIZE
    for step in range(STEPS):
        epoch, first = step // steps, step % steps * SIZE
        rows = rows_at(feedline.Order(), N, epoch, np.arange(first, first + SIZE))
        error = FEATURES[rows] @ slope + offset - TARGETS[rows]
        yield np.mean(error**2)
        slope, offset = slope - RATE * 2 * error @ FEATURES[rows] / SIZE, offset - RATE * 2 * error.mean()


@pytest.mark.parametrize("topology", [ALONE, *TOPOLOGIES], ids=str)
@pytest.mark.parametrize("layout", ["data", "permuted", "model_across"])
def test_losses_equal_those_of_numpy(outcome, layout, topology):
    found = outcome(topology, losses, layout)
    np.testing.assert_allclose(found, outcome(ALONE, losses, "data"), rtol=1e-5)
    np.testing.assert_allclose(found, list(losses_by_numpy()), rtol=1e-4)
