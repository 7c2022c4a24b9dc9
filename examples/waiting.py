"""Why does this loop wait? Ask the feed, change what it advises, ask again; and measure what each stage costs.

python examples/waiting.py
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import feedline

BATCH = 256
LAYERS = 64


class SlowStore:
    """4,096 rows that come from far away: each row takes 0.1 ms, in whatever thread it is read."""

    spec = {"x": jax.ShapeDtypeStruct((64,), np.float32)}  # noqa: RUF012
    identity = {"kind": "slow store"}  # noqa: RUF012

    def __len__(self):
        return 4096

    def read(self, rows, out):
        time.sleep(1e-4 * len(rows))
        out["x"][...] = np.sin(rows)[:, None]

    def close(self):
        pass


@jax.jit
def train_step(weights, batch):
    def loss(weights):
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ weights), None), batch["x"], length=LAYERS)
        return jnp.mean((y - batch["x"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def trained(feed, steps=150):
    """Train for a number of steps, of about 10 ms each."""
    weights = jnp.zeros((64, 64))
    for _, batch in zip(range(steps), feed, strict=False):
        weights, loss = train_step(weights, batch)
        loss.block_until_ready()


def feed_of(**options):
    return feedline.Feed(SlowStore(), BATCH, jax.devices()[0], reading=feedline.Reading(**options))


def main():
    with feed_of(threads=2) as feed:
        trained(feed)
        report = feed.report()
        print(report)
    if report.change is not None and "threads" in report.change.then:
        options = report.change.then  # such as {"threads": 4, "buffer": 4}
        print(f"\nwith {options}:")
        with feed_of(**options) as feed:
            trained(feed)
            print(feed.report())
    print("\nwithout one stage after the other:")
    with feed_of(threads=2) as feed, feed.diagnose(steps=200):
        trained(feed, steps=200)


if __name__ == "__main__":
    main()
