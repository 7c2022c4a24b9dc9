"""One process of `scale.py --real`: takes some batches of rows and of lanes, and writes what it saw.

feedline launch --processes 64 --cpu --devices-per-process 1 -- python benchmarks/claims/scale_job.py FOLDER BEGAN
"""

from __future__ import annotations

import collections
import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from claims.scale_plan import LOCAL_ROWS, vast_source
from feedline._src.agreement.coordination import Coordination
from feedline._src.cluster.join import initialize
from feedline._src.feed import Feed
from feedline._src.options import Reading
from feedline._src.sources.lanes import Lanes

_PATIENCE_S = 1800.0
_ROWS = 10**12
_BATCHES = 8
_LANE_BATCHES = 16
_LANE_ROWS = 4
_PREFETCH = 2
_HEARTBEATS = ("feedline-answers", "feedline-process-0")
"""The threads of `agreement.answers`."""
_CALLS = ("set", "replace", "get", "try_get", "delete", "increment", "dir")


def main() -> None:
    """Write FOLDER/<process>.json."""
    folder, began = Path(sys.argv[1]), float(sys.argv[2])
    seen: dict[str, Any] = {"imported_s": time.time() - began}
    initialize(timeout_s=_PATIENCE_S, bind=False)
    counts = _count()
    seen["joined_s"] = time.time() - began
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    seen["mesh_s"] = time.time() - began
    reading = Reading(threads=2, stall_warning_s=_PATIENCE_S, stall_error_s=_PATIENCE_S)
    processes = jax.process_count()

    before = counts.copy()
    with Feed(vast_source(_ROWS), LOCAL_ROWS * processes, sharding, reading=reading) as feed:
        jax.block_until_ready(next(feed))
        seen["first_batch_s"] = time.time() - began
        seen["build_calls"] = sum((counts - before).values())
        for _ in range(_BATCHES - 1):
            jax.block_until_ready(next(feed))
        seen["rows_calls"] = dict(counts - before)
        seen["memory"] = _memory()

    before = counts.copy()
    lanes = Lanes(_make_lane, processes)
    with Feed(lanes, _LANE_ROWS * processes, sharding, epochs=1, prefetch=_PREFETCH, reading=reading) as feed:
        seen["lane_batches"] = sum(1 for _ in feed)
    seen["lanes_calls"] = dict(counts - before)
    seen["window"] = _PREFETCH
    seen["done_s"] = time.time() - began
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(seen))


def _count() -> collections.Counter[str]:
    """From now on, the calls of this process to the service, by name.

    Heartbeats, which go on beside any feed, do not count, and a wait that begins again after a second is one call.
    """
    counts: collections.Counter[str] = collections.Counter()
    waited_for: dict[str, str] = {}  # by thread: the key of its latest `get`, if that was its latest call

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(Coordination, name)

        @functools.wraps(call)
        def count(*arguments: Any, **named: Any) -> Any:
            thread = threading.current_thread().name
            key = arguments[1] if name == "get" else ""
            if thread not in _HEARTBEATS and (not key or waited_for.get(thread) != key):
                counts[name] += 1
            waited_for[thread] = key
            return call(*arguments, **named)

        return count

    for name in _CALLS:
        setattr(Coordination, name, counted(name))
    return counts


def _make_lane(lane: int, count: int) -> grain.IterDataset[Any]:
    rows = grain.MapDataset.range(_LANE_ROWS * _LANE_BATCHES)
    return rows.map(lambda row: {"x": np.int32(row + lane)}).to_iter_dataset()


def _memory() -> dict[str, int]:
    """Bytes of memory of this process by kind, as Linux counts them: Rss, Pss, Private."""
    found: collections.Counter[str] = collections.Counter()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name.partition("_")[0]] += (
            int(value.split()[0]) * 1024 * (name in ("Rss", "Pss") or "Private" in name)
        )
    return {name: found[name] for name in ("Rss", "Pss", "Private")}


if __name__ == "__main__":
    main()
