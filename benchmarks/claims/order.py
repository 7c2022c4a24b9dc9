"""What does the shuffled order cost for each row?

feedline claims at most 12 ns of a core for a row at 16,384 positions a call and 8 ns at 65,536, for any number of
rows. Refuted if the median CPU time of one thread is above that for one of ROWS, with `Order(shuffle=True)`.
The blocked order and two threads are measured without a claim: a loader has several threads, and each NumPy call
releases the interpreter's lock. On a busy machine only the CPU time of one thread is meaningful.

    python benchmarks/claims/order.py --out order.json
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

from feedline._src.options import Blocks, Order
from feedline._src.order.epoch import rows_at

ROWS = {"10^6": 10**6, "2^20+1": 2**20 + 1, "10^9": 10**9, "2^40+1": 2**40 + 1, "10^12": 10**12, "10^15": 10**15}
CLAIMED_NS = {8192: None, 16_384: 12.0, 65_536: 8.0}
SHUFFLES: dict[str, bool | Blocks] = {
    "full": True,
    "blocked": Blocks(rows=341, window=64),  # blocks of 1 MiB if rows have 3 KiB
}
_POSITIONS = 1 << 20
"""Positions in a sample, over several calls."""


def costs(repeats: int) -> list[dict[str, Any]]:
    """Nanoseconds a row for every order, number of rows, positions a call, and one and two threads.

    Samples are taken in rounds, so that a busy moment of the machine affects all cases alike.

    Returns:
      for each case {"shuffle", "rows", "batch", "threads", "median_cpu_ns", "median_wall_ns", "cpu_ns": samples,
      "wall_ns": samples, "claimed_ns": None where nothing is claimed}.
    """
    found: list[dict[str, Any]] = [
        {"shuffle": shuffle, "rows": rows, "batch": batch, "threads": threads, "cpu_ns": [], "wall_ns": []}
        for shuffle in SHUFFLES
        for rows in ROWS
        for batch in CLAIMED_NS
        for threads in (1, 2)
    ]
    for _ in range(repeats):
        for each in found:
            order = Order(7, SHUFFLES[each["shuffle"]])
            cpu, wall = _sample(order, ROWS[each["rows"]], each["batch"], each["threads"])
            each["cpu_ns"].append(round(cpu, 3))
            each["wall_ns"].append(round(wall, 3))
    for each in found:
        each["median_cpu_ns"] = statistics.median(each["cpu_ns"])
        each["median_wall_ns"] = statistics.median(each["wall_ns"])
        claims = each["shuffle"] == "full" and each["threads"] == 1
        each["claimed_ns"] = CLAIMED_NS[each["batch"]] if claims else None
    return found


def _sample(order: Order, n: int, batch: int, threads: int) -> tuple[float, float]:
    """(CPU, wall) time in ns a row, over all threads; each thread looks up other positions of epoch 1."""
    calls, start = _POSITIONS // batch, threading.Barrier(threads)
    clocks: list[tuple[float, float, float]] = []

    def look_up(thread: int) -> None:
        firsts = [(call * threads + thread) * batch % (n - batch) for call in range(calls)]
        batches = [range(first, first + batch) for first in firsts]  # adjacent positions, as those of a batch
        start.wait()
        begun, busy = time.perf_counter(), time.thread_time()
        for positions in batches:
            rows_at(order, n, 1, positions)
        clocks.append((begun, time.perf_counter(), time.thread_time() - busy))

    workers = [threading.Thread(target=look_up, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    begun, ended, busy = zip(*clocks, strict=True)
    rows = calls * batch * threads
    return sum(busy) * 1e9 / rows, (max(ended) - min(begun)) * 1e9 / rows


def table(found: Sequence[dict[str, Any]]) -> str:
    """The medians as text, and whether they refute the claim."""
    lines = [
        "ns a row: of a core, and on the clock",
        f"{'shuffle':8} {'threads':>7} {'rows':>7}" + "".join(f"{batch:>15,}" for batch in CLAIMED_NS),
    ]
    for shuffle in SHUFFLES:
        for threads in (1, 2):
            for rows in ROWS:
                here = [
                    each
                    for each in found
                    if (each["shuffle"], each["threads"], each["rows"]) == (shuffle, threads, rows)
                ]
                cells = "".join(f"{each['median_cpu_ns']:8.1f}{each['median_wall_ns']:7.1f}" for each in here)
                lines.append(f"{shuffle:8} {threads:7} {rows:>7}{cells}")
    refuting = [each for each in found if each["claimed_ns"] and each["median_cpu_ns"] > each["claimed_ns"]]
    shown = [
        f"{each['median_cpu_ns']:.1f} ns at {each['rows']} rows, {each['batch']:,} positions" for each in refuting
    ]
    return "\n".join([*lines, f"refuted: {'; '.join(shown)}" if shown else "not refuted"])


if __name__ == "__main__":
    asked = parser(__doc__)
    asked.add_argument("--repeats", type=int, default=9)
    options = asked.parse_args()
    found = costs(options.repeats)
    print(table(found))
    save("order", options, results=found)
