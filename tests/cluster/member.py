"""A program for the tests: one of several processes, which computes a sum over all their devices."""

import json

import feedline

feedline.cluster.initialize()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

mesh = jax.make_mesh((jax.device_count(),), ("data",))
rows = np.arange(jax.device_count(), dtype=np.float32)
batch = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("data")), lambda index: rows[index])
total = jax.jit(
    jax.shard_map(lambda part: jax.lax.psum(part, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
)(batch)
seen = {
    "process": jax.process_index(),
    "processes": jax.process_count(),
    "local_devices": jax.local_device_count(),
    "total": total.tolist(),
}
print(f"{json.dumps(seen)}\n", end="", flush=True)
