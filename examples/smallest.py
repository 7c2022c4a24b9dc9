"""The smallest loop: rows in a file, batches on the mesh.

python examples/smallest.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline


def main() -> None:
    # 10,000 rows of 8 numbers; the model learns their sum. Your rows are already on disk.
    folder = Path(tempfile.mkdtemp())
    x = np.random.default_rng(0).normal(size=(10_000, 8)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", x.sum(axis=1))

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    @jax.jit
    def train_step(weights, batch):
        def loss_of(weights):
            return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return weights - 0.1 * gradient, loss

    weights = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec()))
    source = {"x": folder / "x.npy", "y": folder / "y.npy"}
    with feedline.Feed(source, batch_size=800, sharding=sharding, epochs=5) as feed:
        for step, batch in enumerate(feed):
            weights, loss = train_step(weights, batch)
            if step % 10 == 0:
                print(f"step {step}, loss {loss:.6f}")  # waits for the devices, now and then
    print(f"{len(feed)} steps on {len(jax.devices())} devices, loss {loss:.6f}")


if __name__ == "__main__":
    main()
