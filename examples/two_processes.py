"""Several processes on one mesh: each reads its own rows, and all of them train one model.

feedline launch --processes 2 --cpu --devices-per-process 2 -- python examples/two_processes.py

The same script runs unchanged under srun, mpirun and a Kubernetes Job, and alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline


def main() -> None:
    feedline.cluster.initialize()  # before jax is used; then jax.devices() lists the devices of all processes

    # 10,000 rows of 8 numbers; the model learns their sum. Every process can read all rows.
    x = np.random.default_rng(0).normal(size=(10_000, 8)).astype(np.float32)
    source = {"x": x, "y": x.sum(axis=1)}

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    @jax.jit
    def train_step(weights, batch):
        def loss_of(weights):
            return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return weights - 0.1 * gradient, loss

    # created on the devices, because device_put to devices of other processes compares the value on all of them
    weights = jax.jit(lambda: jnp.zeros(8), out_shardings=everywhere)()
    with feedline.Feed(source, batch_size=800, sharding=sharding, epochs=5) as feed:
        for batch in feed:
            weights, loss = train_step(weights, batch)
            if feed.get_state()["step"] % 10 == 0:
                # wait for the devices now and then: on CPU devices, jax may hang once 32 steps are queued
                loss.block_until_ready()

    mine = len(feedline.local_rows(sharding, 800))
    if jax.process_index() == 0:
        print(
            f"{len(feed)} steps on {len(jax.devices())} devices of {jax.process_count()} processes, "
            f"{mine} of 800 rows read here, loss {loss:.6f}"
        )


if __name__ == "__main__":
    main()
