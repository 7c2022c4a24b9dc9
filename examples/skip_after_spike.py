"""After a loss spike: return to the weights from before the spike, and continue with the rows after it.

python examples/skip_after_spike.py
feedline launch --processes 2 --cpu --devices-per-process 2 -- python examples/skip_after_spike.py

Several processes need no further code: the loss is that of the global batch, so all processes see the same number
and move to the same position.
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

SAVE_EVERY = 25  # steps
SPIKE = 20.0  # times the median of the latest losses
SKIP = 3  # batches to skip after the one with the spike


@jax.jit
def train_step(weights, batch):
    def loss_of(weights):
        return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.02 * gradient, loss


def skip(feed: feedline.Feed, saved: dict, batches: int) -> None:
    """Skip the next `batches` batches of the feed, and set its step to that of the state `saved`."""
    rows = saved["fingerprint"]["rows"]  # of an epoch
    epochs, position = divmod(feed.position + batches * feed.batch_size, rows)
    epoch = feed.epoch + epochs
    feed.set_state(saved)  # the step of the weights
    feed.seek(epoch, position)  # does not change the step


def main() -> None:
    feedline.cluster.initialize()
    # 40,000 rows of 8 numbers; the model learns their sum. In 1,000 of them the sum is 1,000 times too large
    x = np.random.default_rng(0).normal(size=(40_000, 8)).astype(np.float32)
    y = x.sum(axis=1)
    y[24_000:25_000] *= 1000

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    weights = jax.jit(lambda: jnp.zeros(8), out_shardings=NamedSharding(mesh, PartitionSpec()))()
    unshuffled = feedline.Order(shuffle=False)  # so that the bad rows are adjacent
    with feedline.Feed({"x": x, "y": y}, batch_size=400, sharding=sharding, order=unshuffled) as feed:
        saved, saved_weights, losses = feed.get_state(), weights, []
        while (step := feed.get_state()["step"]) < 80:
            if step % SAVE_EVERY == 0:
                saved, saved_weights = feed.get_state(), weights  # in your loop: written to disk by Orbax
            before = feed.get_state()
            new_weights, loss = train_step(weights, next(feed))
            usual = statistics.median(losses[-50:]) if losses else np.inf
            if float(loss) < SPIKE * usual + 1:  # false for nan, too
                weights = new_weights
                losses.append(float(loss))
                continue
            rows = feed.rows_of(before)  # the rows of this batch, to look at
            skip(feed, saved, SKIP)
            weights = saved_weights
            if jax.process_index() == 0:
                print(
                    f"loss {float(loss):.1e} in step {step + 1}, on rows {rows.min()} to {rows.max()}: back to "
                    f"step {saved['step']}, on from position {feed.position}"
                )
    if jax.process_index() == 0:
        print(f"{step} steps, loss {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
