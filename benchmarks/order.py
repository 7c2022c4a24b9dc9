"""What does it cost a row to know its place in the shuffle?

feedline claims at most 12 ns of a core for a row at 16,384 positions a call and 8 ns at 65,536, for any number of
rows. Refuted if the median CPU time of one thread is above that for one of ROWS, with Order(shuffle=True).
Nothing is claimed for the blocked order, nor for two threads: they are shown because a loader has several, and
each NumPy call hands the interpreter's lock over. On a busy machine only the CPU time of one thread says much.

    python benchmarks/order.py          # about half a minute; --json: samples as one object in the last line
"""

import argparse
import json
import statistics
import threading
import time

import numpy as np

from feedline import Blocks, Order
from feedline.bench.machine import describe
from feedline.order import rows_at

ROWS = {"10^6": 10**6, "2^20+1": 2**20 + 1, "10^9": 10**9, "2^40+1": 2**40 + 1, "10^12": 10**12, "10^15": 10**15}
CLAIMED_NS = {8192: None, 16_384: 12.0, 65_536: 8.0}
SHUFFLES = {"full": True, "blocked": Blocks(rows=341, window=64)}  # blocks of 1 MiB, were the rows of 3 KiB
REPEATS = 9
POSITIONS = 1 << 20  # a sample: so many positions, in as many calls as it takes


def sample(order, n, batch, threads):
    """(CPU, wall) time in ns for each row of all threads; each looks up batches of its own of epoch 1."""
    calls, start, clocks = POSITIONS // batch, threading.Barrier(threads), []

    def look_up(thread):
        firsts = (np.arange(calls) * threads + thread) * batch % (n - batch)
        places = [np.arange(first, first + batch) for first in firsts]
        start.wait()
        begun, busy = time.perf_counter(), time.thread_time()
        for positions in places:
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


def measure():
    """Rounds in turns, so that a busy moment of the machine does not fall on one configuration alone."""
    results = [
        {"shuffle": shuffle, "rows": rows, "batch": batch, "threads": threads, "cpu_ns": [], "wall_ns": []}
        for shuffle in SHUFFLES
        for rows in ROWS
        for batch in CLAIMED_NS
        for threads in (1, 2)
    ]
    for _ in range(REPEATS):
        for result in results:
            order = Order(7, SHUFFLES[result["shuffle"]])
            cpu, wall = sample(order, ROWS[result["rows"]], result["batch"], result["threads"])
            result["cpu_ns"].append(round(cpu, 3))
            result["wall_ns"].append(round(wall, 3))
    for result in results:
        result["median_cpu_ns"] = statistics.median(result["cpu_ns"])
        result["median_wall_ns"] = statistics.median(result["wall_ns"])
    return results


def refutations(results):
    return [
        f"{result['median_cpu_ns']:.1f} ns a row at {result['rows']} rows, {result['batch']} positions"
        for result in results
        if result["shuffle"] == "full" and result["threads"] == 1 and CLAIMED_NS[result["batch"]]
        if result["median_cpu_ns"] > CLAIMED_NS[result["batch"]]
    ]


def show(results):
    print(f"ns a row, of a core and on the clock: medians of {REPEATS}")
    print(f"{'shuffle':8} {'threads':>7} {'rows':>7}", *(f"{batch:>14,}" for batch in CLAIMED_NS))
    for shuffle in SHUFFLES:
        for threads in (1, 2):
            for rows in ROWS:
                line = [r for r in results if (r["shuffle"], r["threads"], r["rows"]) == (shuffle, threads, rows)]
                cells = (f"{r['median_cpu_ns']:7.1f}{r['median_wall_ns']:7.1f}" for r in line)
                print(f"{shuffle:8} {threads:7} {rows:>7}", *cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object in the last line")
    options = parser.parse_args()
    machine, results = describe(), measure()
    show(results)
    against = refutations(results)
    print("refuted:" if against else "not refuted", "; ".join(against))
    if options.json:
        print(json.dumps({"machine": machine, "claimed_ns": CLAIMED_NS, "refuted": against, "results": results}))


if __name__ == "__main__":
    main()
