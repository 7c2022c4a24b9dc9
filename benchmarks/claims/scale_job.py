"""How long does a job of many real processes take to start, and what memory does each of them need?

feedline launch --processes 64 --cpu --devices-per-process 1 -- python benchmarks/claims/scale_job.py $(date +%s)

Each process takes some batches of 10^12 rows, and prints the seconds since the launch and its memory.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from claims.core import Computed

ROWS, LOCAL_ROWS, BATCHES, PATIENCE_S = 10**12, 256, 8, 1800.0


def main():
    launched, times = float(sys.argv[1]), {}
    times["imported"] = time.time() - launched
    feedline.cluster.initialize(timeout_s=PATIENCE_S, bind=False)
    times["joined"] = time.time() - launched
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    times["mesh"] = time.time() - launched
    reading = feedline.Reading(threads=2, stall_warning_s=PATIENCE_S, stall_error_s=PATIENCE_S)
    with feedline.Feed(Computed(ROWS), LOCAL_ROWS * jax.process_count(), sharding, reading=reading) as feed:
        for batch in range(BATCHES):
            jax.block_until_ready(next(feed))
            if batch == 0:
                times["first batch"] = time.time() - launched
        memory = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in memory if line.startswith("Private")) >> 10
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items())
    print(f"process {jax.process_index()}: {told}; {private} MiB of its own", flush=True)


if __name__ == "__main__":
    main()
