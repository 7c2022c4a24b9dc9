"""`counted_build.py FOLDER`: builds a feed, and saves how often this process called the coordination service."""

import functools
import sys
import threading
from pathlib import Path

import feedline

feedline.cluster.initialize()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from feedline._src.agreement import agree, all_gather  # noqa: E402
from feedline._src.agreement.coordination import Coordination  # noqa: E402

HEARTBEATS = ("feedline-heartbeat", "feedline-process-0")
"""Threads that call the service whether or not there is a feed. Their calls do not count."""
agree._SLICE_S = all_gather._SLICE_S = 100.0  # so one call suffices to wait for a late process
calls = []
last = {}
"""{thread: key of its latest call, if it was `get`}. A wait is one call, even if it gets a key several times."""


def counted(name):
    call = getattr(Coordination, name)

    @functools.wraps(call)
    def count(*arguments, **named):
        thread, key = threading.current_thread().name, arguments[1] if name == "get" else ""
        if thread not in HEARTBEATS and (not key or last.get(thread) != key):
            calls.append(name)
        last[thread] = key
        return call(*arguments, **named)

    return count


for name in ("set", "replace", "get", "try_get", "delete", "increment", "dir"):
    setattr(Coordination, name, counted(name))
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
with feedline.Feed(np.zeros((64, 8)), 8, sharding) as feed:
    jax.block_until_ready(next(feed))
    Path(sys.argv[1], str(jax.process_index())).write_text(str(len(calls)))
