"""A small job of real processes on this machine: how long it takes to start, and what each process needs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_TIMES = ("imported_s", "joined_s", "mesh_s", "first_batch_s", "done_s")


def real(processes: int) -> dict[str, Any]:
    """Start so many processes by `feedline launch`, each with one CPU device, and collect what they saw.

    Returns:
      {"processes", times since the launch of the median and the last process as {"first_batch_s": [median, last]},
      "memory_bytes": medians by kind, "build_calls": calls of each process to the service until the first batch,
      "lanes_calls": calls by name of a feed of lanes, "ended_s": when all had ended}.

    Raises:
      RuntimeError: a process failed; the message ends with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        launch = ["launch", "--processes", str(processes), "--cpu", "--devices-per-process", "1", "--"]
        job = [sys.executable, str(Path(__file__).with_name("scale_job.py")), folder, repr(began)]
        done = subprocess.run(
            [sys.executable, "-m", "feedline", *launch, *job], capture_output=True, text=True, check=False
        )
        ended_s = time.time() - began
        if done.returncode:
            raise RuntimeError(f"{processes} processes: exit code {done.returncode}; {done.stderr[-2000:]}")
        seen = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if len(seen) != processes:
        raise RuntimeError(f"of {processes} processes {len(seen)} wrote what they saw")
    return {
        "processes": processes,
        **{
            name: [statistics.median(one[name] for one in seen), max(one[name] for one in seen)] for name in _TIMES
        },
        "ended_s": ended_s,
        "memory_bytes": {
            kind: statistics.median(one["memory"][kind] for one in seen) for kind in ("Rss", "Pss", "Private")
        },
        "build_calls": [one["build_calls"] for one in seen],
        "lanes_calls": statistics.mean(sum(one["lanes_calls"].values()) for one in seen),
        "windows": -(-seen[0]["lane_batches"] // seen[0]["window"]),
    }
