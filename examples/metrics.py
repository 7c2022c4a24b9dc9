"""Metrics for Prometheus and TensorBoard from a loop of your own.

python examples/metrics.py
"""

import tempfile
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline.metrics import serve
from feedline.trainer import TensorBoardLog


def main() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    x = np.random.default_rng(0).normal(size=(8_000, 64)).astype(np.float32)
    train_step = jax.jit(lambda weights, batch: weights + 0.1 * jnp.mean(batch["x"], axis=0))
    weights = jax.device_put(np.zeros(64, np.float32), NamedSharding(sharding.mesh, PartitionSpec()))
    folder = Path(tempfile.mkdtemp())

    with (
        feedline.Feed({"x": x}, batch_size=800, sharding=sharding) as feed,
        serve({"train": feed}, port=0) as server,  # 0: a free port; Prometheus needs a fixed one, such as 9464
        TensorBoardLog(folder, feed=feed) as log,  # tensorboard --logdir FOLDER
    ):
        for step, batch in zip(range(1, 101), feed, strict=False):
            weights = train_step(weights, batch)
            if step % 10 == 0:
                log.write(step, {"weight": weights[0]})  # adds the feed's metrics, at most once a second
        text = urllib.request.urlopen(server.url).read().decode()  # Prometheus does this every 15 s

    for line in text.splitlines():
        if line.startswith(("feedline_au_ratio", "feedline_stage_seconds_total", "feedline_rows_total")):
            print(line)


if __name__ == "__main__":
    main()
