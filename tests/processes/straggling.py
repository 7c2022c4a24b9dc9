"""A process of test_straggler.py: trains in step with the other one, while one of them reads slowly."""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline._src.listen import listening

slow, folder = int(sys.argv[1]), Path(sys.argv[2])
feedline.cluster.initialize()
listening._PUBLISH_EVERY_S = 0.2


class Source:
    spec = {"x": jax.ShapeDtypeStruct((4,), np.float32)}  # noqa: RUF012
    identity = {"kind": "straggling"}  # noqa: RUF012

    def __len__(self):
        return 10_000

    def read(self, rows, out):
        time.sleep(0.200 if jax.process_index() == slow else 0.0)
        out["x"][...] = 1

    def close(self):
        pass


mesh = Mesh(np.array(jax.devices()), ("data",))
step = jax.jit(lambda x: jnp.mean(x))  # it needs the rows of all processes
with feedline.Feed(Source(), 64, NamedSharding(mesh, P("data")), reading=feedline.Reading(threads=2)) as feed:
    for _ in range(60):
        step(next(feed)["x"]).block_until_ready()
        time.sleep(0.010)
    report = feed.report()
(folder / f"{jax.process_index()}.json").write_text(json.dumps(report.to_dict()))
print(report)
