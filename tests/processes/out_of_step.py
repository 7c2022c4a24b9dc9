"""A program of two processes, one of which does what the other does not: ``out_of_step.py ROLE [FOLDER]``.

It prints "reached" in places that it must not reach.
"""

import sys
import time

import feedline

feedline.cluster.initialize(abort_after_s=20)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from feedline.trainer import fit  # noqa: E402

role, odd = sys.argv[1], jax.process_index() == 1
sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("data",)), P("data"))
feed = feedline.Feed({"x": np.arange(640, dtype=np.float32)}, 4, sharding, with_place=True)


@jax.jit
def step(batch):
    return jnp.sum(batch["x"]), batch["place"].max() != batch["place"].min()


def take(count):
    for _ in range(count):
        next(feed)


if role == "in step":
    """Both processes move. One alone also moves to the place where it already is."""
    take(3)
    feed.seek(2)
    feed.seek(3, 8)
    take(2)
    if odd:
        feed.set_state(feed.get_state())
    take(1)
    with feedline.Feed({"x": np.arange(8.0)}, 4, sharding, epochs=1) as other:
        assert sum(1 for _ in other) == 2
elif role == "in a step":
    total, mixed = step(next(feed))
    assert not mixed
    take(odd)
    total, mixed = step(next(feed))
    print(f"mixed {bool(mixed)}", flush=True)
    take(not odd)
elif role == "closes":
    take(12 + odd)
    feed.close()
elif role == "one moves":
    take(2)
    if odd:
        feed.seek(1)
    take(3)
    time.sleep(1000)
    print("reached", flush=True)
else:
    folder = sys.argv[2] if role == "saves" else None

    def after_step(done):
        if odd and role == "saves" and done == 3:
            feed.seek(0, 200)
        if odd and role == "fits later" and done == 150:
            next(feed)

    fit(
        feed,
        lambda key: {"w": jnp.zeros(())},
        lambda params, batch: (jnp.mean((batch["x"] * params["w"] - 1) ** 2), {}),
        optax.sgd(1e-9),
        steps=4 if role == "saves" else 250,
        after_step=after_step,
        checkpoint_dir=folder,
    )
    print("reached", flush=True)
