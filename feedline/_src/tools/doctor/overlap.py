"""How much longer is a step than the slower of loading and computing?

A load that waits, as for a disk or a network, and a computation on the devices take equally long. With perfect
overlap a step takes as long as one of them; without overlap, as long as both.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline._src.feed import Feed
from feedline._src.options import Reading

_PREFETCHES = (0, 1, 2, 3)
_UNCOUNTED = 6
"""First steps that are not counted, because their batches were read ahead before the measurement."""


class _SlowSource:
    """A `RowSource` of which each read waits `load_s` seconds and uses no CPU."""

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
    """Run `steps` steps at each depth, with a load and a computation of `step_s` seconds each.

    Returns:
      {"load_s", "compute_s": as measured alone, "depths": [{"prefetch", "step_s": the median,
      "of_the_slower", "samples"}]}.
    """
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    batch = jax.device_put(np.ones((len(jax.devices()), 64), np.float32), sharding)
    compute = _computation(batch, step_s)
    compute_s = statistics.median(_timed(lambda: compute(batch)) for _ in range(9))
    depths = []
    for prefetch in _PREFETCHES:
        # one thread: loads do not overlap each other
        reading = Reading(threads=1, buffer=1)
        with Feed(_SlowSource(step_s), len(jax.devices()), sharding, reading=reading, prefetch=prefetch) as feed:
            samples = [_timed(lambda: compute(next(feed))) for _ in range(steps + _UNCOUNTED)][_UNCOUNTED:]
        median = statistics.median(samples)
        depths.append(
            {
                "prefetch": prefetch,
                "step_s": median,
                "of_the_slower": median / max(step_s, compute_s),
                "samples": samples,
            }
        )
    return {"load_s": step_s, "compute_s": compute_s, "depths": depths}


def _computation(batch: jax.Array, step_s: float) -> Callable[[jax.Array], jax.Array]:
    """A jitted function that keeps the devices busy for about `step_s` seconds."""

    @jax.jit
    def computed(x: jax.Array, count: jax.Array) -> jax.Array:
        done: jax.Array = jax.lax.fori_loop(0, count, lambda _, y: jnp.sin(y), x)
        return done

    computed(batch, jnp.int32(1)).block_until_ready()
    count = 1000
    while (took := _timed(lambda: computed(batch, jnp.int32(count)))) < step_s / 2:  # noqa: B023
        count *= 2
    count = jnp.int32(count * step_s / took)
    return functools.partial(computed, count=count)


def _timed(call: Callable[[], jax.Array]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began
