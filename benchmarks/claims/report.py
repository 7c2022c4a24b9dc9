"""Draws the report on a feed that reads more slowly than the loop trains: 60 ms a batch, and steps of 10 ms.

python benchmarks/claims/report.py report.svg
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import feedline


class SlowStorage:
    """Rows that take 60 ms a batch to read, as from a disk that is far away."""

    spec = jax.ShapeDtypeStruct((28, 28), np.uint8)
    identity: dict[str, Any] = {"kind": "slow storage"}  # noqa: RUF012  a `RowSource` has it on each object

    def __len__(self) -> int:
        return 1_000_000

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        time.sleep(0.060)
        out[:] = (rows % 256)[:, None, None]

    def close(self) -> None:
        pass


def train_step(weights: jax.Array, batch: jax.Array) -> jax.Array:
    """Some 10 ms of one core."""
    mean = batch.mean() / 1e6
    return jax.lax.fori_loop(0, 8, lambda _, w: w @ w * mean + w, weights)


def main(path: Path) -> None:
    step, weights = jax.jit(train_step), jax.numpy.eye(512) / 512
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with feedline.Feed(SlowStorage(), 64, sharding, reading=feedline.Reading(threads=2)) as feed:
        for _ in range(200):
            weights = step(weights, next(feed)).block_until_ready()
        report = feed.report()
    print(report)
    report.save(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
