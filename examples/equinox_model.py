"""A model written with equinox, trained with `feedline.trainer.fit`: its arrays are the parameters.

pip install equinox
python examples/equinox_model.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import feedline
from feedline.trainer import digits, fit, mean_of_valid, mesh_for


class Net(eqx.Module):
    """Scores of the ten classes, float32 [10], of one image, uint8 [64]."""

    layers: eqx.nn.Sequential

    def __init__(self, key: jax.Array) -> None:
        a, b, c, d = jax.random.split(key, 4)
        self.layers = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, 32, 3, padding=1, key=a),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.Conv2d(32, 64, 3, padding=1, key=b),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.MaxPool2d(2, stride=2),
                eqx.nn.Conv2d(64, 64, 3, padding=1, key=c),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.MaxPool2d(2, stride=2),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(4 * 64, 10, key=d),
            ]
        )

    def __call__(self, image: jax.Array) -> jax.Array:
        return self.layers(image.reshape(1, 8, 8) / 255.0)


def init(key):
    """The arrays of a new model, with None in place of everything else."""
    return eqx.filter(Net(key), eqx.is_inexact_array)


_, REST = eqx.partition(Net(jax.random.key(0)), eqx.is_inexact_array)  # functions and sizes: the same in any model


def loss(params, batch):
    """The mean cross-entropy of a batch, and its accuracy. Rows that pad the last test batch are left out."""
    scores = jax.vmap(eqx.combine(params, REST))(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])
    right = scores.argmax(axis=1) == batch["label"]
    return mean_of_valid(losses, batch), {"accuracy": mean_of_valid(right.astype(jnp.float32), batch)}


def main() -> None:
    rows = digits()  # 1,437 and 360 images of 8 × 8 pixels
    sharding = NamedSharding(mesh_for("jit_multi"), PartitionSpec("data"))
    in_order = feedline.Order(shuffle=False)
    with (
        feedline.Feed(rows.train, 64, sharding) as feed,
        feedline.Feed(rows.test, 64, sharding, order=in_order, epochs=1, remainder="pad") as test,
    ):
        fitted = fit(feed, init, loss, optax.adam(2e-3), steps=300)
        result = fitted.evaluate(test)
        net = eqx.combine(fitted.params, REST)  # the trained model
        batch = next(iter(test))
        print(f"first test image: a {net(batch['image'][0]).argmax()}, its label is {batch['label'][0]}")
    print(f"test accuracy {result.metrics['accuracy']:.4f} over {result.rows} images")


if __name__ == "__main__":
    main()
