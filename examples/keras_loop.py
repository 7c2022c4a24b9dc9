"""A Keras model trained in a loop over a feed; one Orbax checkpoint holds its variables and the feed's state.

    KERAS_BACKEND=jax python examples/keras_loop.py FOLDER STEPS

Called again, it continues with the next row.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
import orbax.checkpoint as ocp

import feedline


def main(folder, steps):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
    rows = {"x": x, "y": x.sum(axis=1, keepdims=True)}

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)
    state = [[each.value for each in some.variables] for some in (model, optimizer)]

    def loss(weights, batch):
        predicted, _ = model.stateless_call(weights, [], batch["x"])
        return keras.losses.mean_squared_error(batch["y"], predicted).mean()

    @jax.jit
    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state[0], batch)
        return list(optimizer.stateless_apply(state[1], gradients, state[0])), value

    with (
        ocp.CheckpointManager(Path(folder).absolute()) as checkpoints,
        feedline.Feed(rows, batch_size=50, sharding=sharding) as feed,
    ):
        done = checkpoints.latest_step() or 0
        if done:
            like = ocp.args.Composite(
                state=ocp.args.StandardRestore(state), feed=feedline.checkpoint.Restore(feed)
            )
            state = checkpoints.restore(done, args=like)["state"]
        print("begins at row", feed.position)
        for _, batch in zip(range(steps), feed, strict=False):
            state, value = train_step(state, batch)
        save = ocp.args.Composite(state=ocp.args.StandardSave(state), feed=feedline.checkpoint.Save(feed))
        checkpoints.save(done + steps, args=save)
        print(f"loss {value:.4f} after step {done + steps}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
