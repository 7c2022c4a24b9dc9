"""A training loop that saves and ends between two steps after SIGTERM or Ctrl-C, on any number of processes.

python examples/preemption.py runs/3 60
feedline launch --processes 2 --cpu --devices-per-process 2 -- python examples/preemption.py runs/3 60

The arguments are the folder of the checkpoints, and the number of steps. A second run continues the first one.
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline.checkpoint import Restore, Save


@jax.jit
def train_step(weights, batch):
    def loss_of(weights):
        return jnp.mean((batch["x"] @ weights["slope"] - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, gradient), loss


def main(folder: Path, last_step: int) -> int:
    feedline.cluster.initialize()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    # 10,000 rows of 8 numbers; the model learns their sum. Your rows are on disk.
    x = np.random.default_rng(0).normal(size=(10_000, 8)).astype(np.float32)
    feed = feedline.Feed({"x": x, "y": x.sum(axis=1)}, 800, NamedSharding(mesh, PartitionSpec("data")))
    weights = jax.jit(lambda: {"slope": jnp.zeros(8)}, out_shardings=everywhere)()
    step, stopped = 0, False
    with feed, ocp.CheckpointManager(folder.absolute()) as manager:
        if manager.latest_step() is not None:
            parts = ocp.args.Composite(state=ocp.args.StandardRestore(weights), feed=Restore(feed))
            found = manager.restore(manager.latest_step(), args=parts)
            weights, step = found.state, found.feed["step"]
        while step < last_step and not stopped:
            weights, loss = train_step(weights, next(feed))
            step += 1
            stopped = feedline.cluster.should_stop(step)  # True at the same step on all processes
            if stopped or step % 1000 == 0 or step == last_step:
                parts = ocp.args.Composite(state=ocp.args.StandardSave(weights), feed=Save(feed))
                manager.save(step, args=parts)
            if step % 10 == 0:
                loss.block_until_ready()  # on CPU devices, jax may hang once 32 steps are queued
                if step == 10 and jax.process_index() == 0:
                    print("training", flush=True)
    if jax.process_index() == 0:
        weight = float(weights["slope"][0])
        print(f"{'stopped' if stopped else 'ended'} after step {step}, first weight {weight:.6f}", flush=True)
    return 143 if stopped else 0  # 128 + SIGTERM: the code that schedulers expect after SIGTERM


if __name__ == "__main__":
    arguments = sys.argv[1:] or [tempfile.mkdtemp(), "60"]
    sys.exit(main(Path(arguments[0]), int(arguments[1])))
