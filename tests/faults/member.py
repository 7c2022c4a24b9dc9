"""A program for the tests of faults: one of several processes that train in step with each other.

``member.py train [batches [raise]]`` takes batches of a feed of all processes: endlessly, or so many and then
ends or raises. After each step, a collective, it prints the step's number. ``member.py wait`` only sleeps. The
variables ABORT_AFTER_S and TIMEOUT_S are arguments of `feedline.cluster.initialize`.
"""

import os
import sys
import time

import feedline

timeout_s, abort_after_s = float(os.environ.get("TIMEOUT_S", "60")), float(os.environ.get("ABORT_AFTER_S", "10"))
feedline.cluster.initialize(timeout_s=timeout_s, abort_after_s=abort_after_s)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

if sys.argv[1] == "wait":
    print("step 0", flush=True)
    time.sleep(1000)

sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), P("data"))
total = jax.jit(jnp.sum)
feed = feedline.Feed(np.arange(96.0, dtype=np.float32), 12, sharding)
limit = int(sys.argv[2]) if len(sys.argv) > 2 else None
for step, batch in enumerate(feed, 1):
    print(f"step {step} {total(batch)}", flush=True)  # `total` waits for all processes
    if step == limit:
        if "raise" in sys.argv:
            raise ArithmeticError("as it was told to")
        break
    time.sleep(0.05)
