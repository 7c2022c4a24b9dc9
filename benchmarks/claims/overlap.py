"""How much longer is a step than the slower of loading and computing?

A load that sleeps and a computation take equally long. With perfect overlap, a step takes as long as one of the
two; without overlap, as long as both. Refuted by a median above 1.05 × the slower of the two at prefetch 2.

    python benchmarks/claims/overlap.py --out overlap.json
"""

import statistics
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save
from shared.slow import Slow, computation, timed

import feedline

UNCOUNTED = 6  # first steps, whose batches were read ahead before the measurement


def overlap(step_s, steps):
    """The time of a step at each depth of prefetch."""
    devices = len(jax.devices())
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    batch = jax.device_put(np.ones((devices, 64), np.float32), sharding)
    compute = computation(batch, step_s)
    compute_s = statistics.median(timed(lambda: compute(batch)) for _ in range(9))
    reading = feedline.Reading(threads=1, buffer=1)  # one thread: loads do not overlap each other
    depths = []
    for prefetch in range(4):
        with feedline.Feed(Slow(step_s), devices, sharding, reading=reading, prefetch=prefetch) as feed:
            samples = [timed(lambda: compute(next(feed))) for _ in range(steps + UNCOUNTED)][UNCOUNTED:]
        median = statistics.median(samples)
        ratio = median / max(step_s, compute_s)
        depths.append({"prefetch": prefetch, "step_s": median, "of_the_slower": ratio, "samples": samples})
        print(
            f"prefetch {prefetch}: a step of {median * 1e3:.2f} ms, {ratio:.3f} × the slower of load and compute"
        )
    return {"load_s": step_s, "compute_s": compute_s, "depths": depths}


if __name__ == "__main__":
    asked = parser(__doc__)
    asked.add_argument("--step-ms", type=float, default=20, help="how long a load takes, and a computation")
    asked.add_argument("--steps", type=int, default=100, help="measured at each depth of prefetch")
    options = asked.parse_args()
    save("overlap", options, results=overlap(options.step_ms / 1e3, options.steps))
