"""Checkpoints of your own training loop, with Orbax: the arrays, and the state of the feed.

python examples/checkpoints.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline.checkpoint import Restore, Save

# 10,000 rows of 8 numbers; the model learns their sum. Your rows are on disk.
X = np.random.default_rng(0).normal(size=(10_000, 8)).astype(np.float32)
SOURCE = {"x": X, "y": X.sum(axis=1)}


@jax.jit
def train_step(weights, batch):
    def loss_of(weights):
        return jnp.mean((batch["x"] @ weights["slope"] + weights["offset"] - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, gradient), loss


def train(folder: Path, devices: int, last_step: int) -> list[float]:
    """Train to `last_step`, from the newest checkpoint if there is one. Returns the losses of these steps."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    weights = {"slope": np.zeros(8, np.float32), "offset": np.zeros((), np.float32)}
    weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
    losses = []
    with (
        feedline.Feed(SOURCE, batch_size=800, sharding=NamedSharding(mesh, PartitionSpec("data"))) as feed,
        ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3)) as manager,
    ):
        saved = manager.latest_step()
        if saved is not None:
            parts = ocp.args.Composite(state=ocp.args.StandardRestore(weights), feed=Restore(feed))
            weights = manager.restore(saved, args=parts).state  # with the shardings of `weights` above
        for step, batch in zip(range((saved or 0) + 1, last_step + 1), feed, strict=False):
            weights, loss = train_step(weights, batch)
            losses.append(float(loss))
            if step % 10 == 0:  # right after the step: the feed's state counts this batch, and no later one
                assert feed.get_state()["step"] == step
                parts = ocp.args.Composite(state=ocp.args.StandardSave(weights), feed=Save(feed))
                manager.save(step, args=parts)  # copies the weights, and writes while the loop continues
    return losses


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    never_stopped = train(folder / "a", devices=len(jax.devices()), last_step=60)
    train(folder / "b", devices=len(jax.devices()), last_step=35)  # ends here; step 30 was the last one saved
    rest = train(folder / "b", devices=1, last_step=60)
    print(
        f"steps 31 to 60 on one device, same losses: {np.allclose(rest, never_stopped[30:], rtol=1e-4, atol=1e-6)}"
    )


if __name__ == "__main__":
    main()
