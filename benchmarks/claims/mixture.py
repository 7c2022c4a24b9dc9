"""What does a mixture cost beside a feed over one array that holds the same rows?

The claim: batches of 16 MiB come at 0.9 times the rate of one array and more, for rows of 256 B and of 3 KB, from
three arrays in memory with the weights 5 : 3 : 2. Refuted if the median ratio of the rounds is below that. The one
array has a leaf of int32 beside it, as the mixture adds one. Both take turns, so that a busy moment concerns both.

The order alone, of adjacent positions and of every second one, is measured on one thread, without a claim.

    python benchmarks/claims/mixture.py
"""

import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

import feedline
import feedline._src.order.mixture
import feedline._src.order.phases
from feedline._src.order.epoch import rows_at

WEIGHTS = {"a": 5, "b": 3, "c": 2}
CASES = [(256, 16 << 20), (256, 4 << 20), (3072, 16 << 20), (3072, 4 << 20)]
"""(bytes of a row, bytes of a batch)."""
MEASURED_BYTES = 2 << 30
CLAIM = 0.9


def rate(source, batch_size, sharding, batches):
    """Rows a second, and rows in a second of processor time, which is meaningful on a busy machine, too."""
    with feedline.Feed(source, batch_size, sharding) as feed:
        for _ in range(10):
            batch = next(feed)
        begun, busy = time.perf_counter(), time.process_time()
        for _ in range(batches):
            batch = next(feed)
        jax.block_until_ready(batch)
        rows = batch_size * batches
        return rows / (time.perf_counter() - begun), rows / (time.process_time() - busy)


def feeds(row_bytes, batch_bytes, rounds, gib):
    rows, batch_size = int(gib * 2**30) // row_bytes, batch_bytes // row_bytes // 8 * 8
    data = np.random.default_rng(0).integers(0, 256, (rows, row_bytes), np.uint8)
    cuts = np.cumsum([0, rows // 2, rows * 3 // 10])
    parts = np.split(data, cuts[1:])
    one = {"x": data, "source": np.zeros(rows, np.int32)}
    mixture = feedline.Mixture({name: {"x": part} for name, part in zip(WEIGHTS, parts, strict=True)}, WEIGHTS)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    batches = max(20, MEASURED_BYTES // batch_bytes)
    pairs = [[rate(source, batch_size, sharding, batches) for source in (one, mixture)] for _ in range(rounds)]
    return {
        "row_bytes": row_bytes,
        "batch_bytes": batch_bytes,
        "rows_per_s": [[alone[0], mixed[0]] for alone, mixed in pairs],
        "rows_per_core_s": [[alone[1], mixed[1]] for alone, mixed in pairs],
        "median_ratio": statistics.median(mixed[0] / alone[0] for alone, mixed in pairs),
        "median_core_ratio": statistics.median(mixed[1] / alone[1] for alone, mixed in pairs),
    }


def orders(rounds):
    """{case: CPU time of one thread, in ns a row}: the median of calls with 16,384 rows."""
    count, lengths = 1 << 14, (10**9, 10**8, 10**7)
    sources = [feedline.Order(seed) for seed in range(3)]
    phases = (feedline._src.order.phases.Phase(0, tuple(WEIGHTS.values())),)
    order = feedline._src.order.mixture.MixtureOrder(tuple(WEIGHTS), lengths, tuple(sources), phases)
    cases = {
        "one source": lambda first: rows_at(sources[0], 10**9, 0, range(first, first + count)),
        "mixture": lambda first: order.rows_at(0, range(first, first + count)),
        "mixture, every second": lambda first: order.rows_at(0, np.arange(first, first + 2 * count, 2)),
    }
    samples = {name: [] for name in cases}
    for call in range(50 * rounds):
        for name, function in cases.items():
            begun = time.thread_time()
            function(10**6 + call * count)
            samples[name].append((time.thread_time() - begun) / count * 1e9)
    return {name: round(statistics.median(found), 1) for name, found in samples.items()}


def main():
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--gib", type=float, default=0.5, help="of rows in memory")
    options = asked.parse_args()
    of_orders = orders(options.rounds)
    print("order, ns a row:", ", ".join(f"{name} {ns}" for name, ns in of_orders.items()))
    found = []
    for case in CASES:
        found.append(feeds(*case, options.rounds, options.gib))
        medians = [statistics.median(each) / 1e6 for each in zip(*found[-1]["rows_per_s"], strict=True)]
        print(
            f"rows of {case[0]:>4} B, batches of {case[1] >> 20:>2} MiB: one array {medians[0]:6.2f} M rows/s, "
            f"mixture {medians[1]:6.2f}, ratio {found[-1]['median_ratio']:.2f}, by time of the cores "
            f"{found[-1]['median_core_ratio']:.2f}"
        )
    refuted = [each for each in found if each["batch_bytes"] == 16 << 20 and each["median_ratio"] < CLAIM]
    print("refuted" if refuted else "not refuted")
    save("mixture", options, order_ns=of_orders, feeds=found)


if __name__ == "__main__":
    main()
