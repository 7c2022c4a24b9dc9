"""How many blocks must a window have for a blocked order to be as random as a shuffle of all rows?

Data of 1,000 labels, sorted by label, which is the worst case, in batches of 1,024. feedline says that a blocked
order is no substitute for shuffling such files once: refuted if a window of 1 GiB or less has 95 % of the labels
that a batch of a full shuffle has. Where rows lie in no order, their labels are as mixed in any of these.

- labels: how many different ones are in a batch, the mean of 40 batches.
- jump: how far apart the rows of adjacent positions are, over the n / 3 of a full shuffle.
- moved: how far rows stand from their position, over the n / 3 of a full shuffle.

    python benchmarks/mixing.py          # seconds; --json: one object in the last line
"""

import argparse
import json

import numpy as np

from feedline import Blocks, Order
from feedline.order.epoch import rows_at

N, LABELS, BATCH, BATCHES = 2_800_000, 1000, 1024, 40  # 8 GiB of rows of 3 KiB
SHUFFLES = {
    "full": True,
    **{f"{r} x {w}": Blocks(r, w) for r in (85, 341, 1365) for w in (4, 16, 64, 256, 1024)},
}


def describe_order(shuffle):
    random, found = np.random.default_rng(0), []
    for seed in range(BATCHES):
        positions = random.integers(N - BATCH) + np.arange(BATCH)
        rows = rows_at(Order(seed, shuffle), N, 0, positions)
        labels = np.unique(rows * LABELS // N).size
        found.append((labels, np.abs(np.diff(rows)).mean() * 3 / N, np.abs(rows - positions).mean() * 3 / N))
    labels, jump, moved = np.mean(found, axis=0)
    return {"labels": round(labels, 1), "jump": round(jump, 3), "moved": round(moved, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object in the last line")
    options = parser.parse_args()
    results = {}
    print(f"{'rows x window':>13} {'rows in it':>10} {'MiB of 3 KiB':>12} {'labels':>7} {'jump':>6} {'moved':>6}")
    for name, shuffle in SHUFFLES.items():
        results[name] = found = describe_order(shuffle)
        held = N if shuffle is True else shuffle.rows * shuffle.window
        figures = f"{found['labels']:7.1f} {found['jump']:6.2f} {found['moved']:6.2f}"
        print(f"{name:>13} {held:10,} {held * 3 / 1024:12,.0f} {figures}")
    if options.json:
        print(json.dumps({"rows": N, "labels": LABELS, "batch": BATCH, "batches": BATCHES, "results": results}))


if __name__ == "__main__":
    main()
