"""How much longer is a step than the slower of loading and computing?

A load that sleeps and a computation take equally long. Refuted by a median above 1.05 × the slower of them at
prefetch 2.

    python benchmarks/claims/overlap.py --out overlap.json
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

import feedline

UNCOUNTED = 6  # first steps, whose batches were read ahead before the measurement


class SlowSource:
    """A `RowSource` of which each read waits `load_s` seconds, like a disk or a network, and uses no CPU."""

    def __init__(self, load_s: float) -> None:
        self.spec = jax.ShapeDtypeStruct((64,), np.float32)
        self.identity = {"kind": "slow"}
        self._load_s = load_s

    def __len__(self) -> int:
        return 1 << 20

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        time.sleep(self._load_s)
        out[...] = 1

    def close(self) -> None:
        """Nothing to close."""


def overlap(step_s: float, steps: int) -> dict[str, Any]:
    """Run `steps` steps at each depth, with a load that waits and a computation of `step_s` seconds each.

    With perfect overlap a step takes as long as one of them; without overlap, as long as both.
    """
    devices = len(jax.devices())
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    batch = jax.device_put(np.ones((devices, 64), np.float32), sharding)
    compute = computation(batch, step_s)
    compute_s = statistics.median(timed(lambda: compute(batch)) for _ in range(9))
    reading = feedline.Reading(threads=1, buffer=1)  # one thread: loads do not overlap each other
    depths = []
    for prefetch in range(4):
        with feedline.Feed(SlowSource(step_s), devices, sharding, reading=reading, prefetch=prefetch) as feed:
            samples = [timed(lambda: compute(next(feed))) for _ in range(steps + UNCOUNTED)][UNCOUNTED:]
        median = statistics.median(samples)
        ratio = median / max(step_s, compute_s)
        depths.append({"prefetch": prefetch, "step_s": median, "of_the_slower": ratio, "samples": samples})
    return {"load_s": step_s, "compute_s": compute_s, "depths": depths}


def computation(batch: jax.Array, step_s: float) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that keeps the devices busy for about `step_s` seconds."""

    @jax.jit
    def computed(x: jax.Array, count: jax.Array) -> jax.Array:
        done: jax.Array = jax.lax.fori_loop(0, count, lambda _, y: jnp.sin(y), x)
        return done

    computed(batch, jnp.int32(1)).block_until_ready()
    count = 1000
    while (took := timed(lambda: computed(batch, jnp.int32(count)))) < step_s / 2:  # noqa: B023
        count *= 2
    return functools.partial(computed, count=jnp.int32(count * step_s / took))


def timed(call: Callable[[], jax.Array]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


if __name__ == "__main__":
    asked = parser(__doc__)
    asked.add_argument("--step-ms", type=float, default=20, help="how long a load takes, and a computation")
    asked.add_argument("--steps", type=int, default=100, help="measured at each depth of prefetch")
    options = asked.parse_args()
    measured = overlap(options.step_ms / 1e3, options.steps)
    for depth in measured["depths"]:
        print(
            f"prefetch {depth['prefetch']}: a step of {depth['step_s'] * 1e3:.2f} ms, "
            f"{depth['of_the_slower']:.3f} × the slower of load and compute"
        )
    save("overlap", options, results=measured)
