"""A training loop with problems that are easy to overlook. `feedline doctor` finds them:

feedline doctor -- python examples/slow_training.py

docs/tools.md shows what the doctor prints.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, WIDTH, BATCH, LAYERS = 80_000, 64, 512, 8


@jax.jit
def train_step(layers: jax.Array, image: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of an autoencoder. The layers are a Python loop, and the old layers are not donated."""

    def loss(layers: jax.Array) -> jax.Array:
        x = image / 255
        for i in range(LAYERS):
            x = x + 0.1 * jnp.tanh(x @ layers[i])
        return jnp.mean((x - image / 255) ** 2)

    value, gradient = jax.value_and_grad(loss)(layers)
    return layers - 0.1 * gradient, value


def main() -> None:
    replicated = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    random = np.random.default_rng(0)
    images = random.integers(256, size=(ROWS, WIDTH)).astype(np.float32)  # uint8 would suffice
    layers = jax.device_put(random.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH, replicated)
    losses, history = [], []
    for epoch in range(2):
        for start in range(0, ROWS, BATCH):  # the last batch is smaller
            rows = images[start : start + BATCH]
            image = jax.device_put(rows, replicated)  # on the training thread; not sharded
            layers, loss = train_step(layers, image)
            losses.append(float(loss))  # waits for the devices in each step
            history.append(image.mean())  # these arrays stay on the devices
        print(f"epoch {epoch}: the loss fell: {losses[-1] < losses[0]}")


if __name__ == "__main__":
    main()
