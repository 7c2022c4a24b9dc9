"""What one process out of thousands does on its own: it builds a feed, and reads its part of each batch."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline._src.build import build, described
from feedline._src.feed_options import FeedOptions
from feedline._src.loader.random_access import RandomAccess
from feedline._src.options import Order, Reading
from feedline._src.order.schedule import Cursor
from feedline._src.run import Stages
from feedline._src.sources.arrays import ArraySource

_ARRAYS = 16
ROW_BYTES = 64
LOCAL_ROWS = 256
"""Rows of each batch that a process reads, with one device: the global batch grows with the processes."""
_STEPS = 32


@dataclasses.dataclass(frozen=True)
class _Client:
    """The client of devices that do not exist. It only has the index of this process."""

    process: int

    def process_index(self) -> int:
        return self.process


@dataclasses.dataclass(frozen=True)
class _Device:
    """A device that does not exist. A mesh of such devices can be planned for, but holds no arrays."""

    id: int
    process_index: int
    client: _Client = dataclasses.field(repr=False)
    platform: str = "cpu"
    device_kind: str = "cpu"


def sharding_of(processes: int, process: int, replicas: int = 1) -> NamedSharding:
    """The batch axis over one device of each process, as process `process` sees it.

    Args:
      replicas: how many adjacent processes hold the same rows.
    """
    client = _Client(process)
    devices = np.empty(processes, object)
    devices[:] = [_Device(number, number, client) for number in range(processes)]
    mesh = Mesh(devices.reshape(-1, replicas), ("data", "model"))
    return NamedSharding(mesh, PartitionSpec("data"))


def vast_source(rows: int) -> ArraySource:
    """`rows` rows in 16 arrays. All rows of an array reside at one address, so they take no memory."""
    ends = [rows * (i + 1) // _ARRAYS for i in range(_ARRAYS)]
    counts = [end - start for start, end in itertools.pairwise([0, *ends])]
    row = np.zeros(ROW_BYTES, np.uint8)
    return ArraySource([np.broadcast_to(row, (count, ROW_BYTES)) for count in counts])


def options_of(source: Any, processes: int, process: int) -> FeedOptions:
    """A feed over these rows, as process `process` sees it."""
    sharding, reading = sharding_of(processes, process), Reading(threads=1)
    return FeedOptions(source, LOCAL_ROWS * processes, sharding, order=Order(seed=7), reading=reading)


def stages_of(source: Any, processes: int, process: int) -> Stages:
    """The stages of the feed of `options_of`, without an agreement with other processes."""
    return build(options_of(source, processes, process)).first


def one_process(rows: int, processes: int, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build and read as the middle one of `processes` processes, at the far end of `rows` rows.

    Returns:
      (figures, the feed's description). The figure "heap_bytes" is the size of the Python objects that a feed
      keeps, with the mesh and jax's map of it. Other figures are medians, with samples: "build_cpu_s", to open and
      plan; "describe_cpu_s", to describe the feed to other processes; "step_cpu_s", to gather a step's rows.
    """
    process, batch, source = processes // 2, LOCAL_ROWS * processes, vast_source(rows)
    stages_of(source, 2, 1)  # allocates what a process keeps after its first feed
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    kept = stages_of(source, processes, process)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    samples: dict[str, list[float]] = {"build": [], "describe": [], "step": []}
    description: dict[str, Any] = {}
    for k in range(repeats):
        # another process, because jax and Python keep the maps of meshes that they have seen
        other = (process + 1 + k) % processes
        stages: Stages = _timed(samples["build"], stages_of, source, processes, other)
        description = _timed(samples["describe"], described, options_of(source, processes, other), stages)
        access = stages.access
        if not isinstance(access, RandomAccess):
            raise TypeError(f"rows in files have random access, got {type(access).__name__}")
        first = rows // batch - _STEPS
        for steps in ([], samples["step"]):  # the first pass only warms up caches
            for number in range(first, first + _STEPS):
                _timed(steps, access.fill, Cursor(0, number * batch), 0, 1, access.buffers.lease())
    figures: dict[str, Any] = {"heap_bytes": after - before}
    for name, found in samples.items():
        figures[f"{name}_cpu_s"], figures[f"{name}_cpu_s_samples"] = statistics.median(found), found
    return figures, description


def _timed(samples: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    """Make a call, append its CPU seconds to the samples, and return its result."""
    began = time.thread_time()
    found = call(*arguments)
    samples.append(time.thread_time() - began)
    return found
