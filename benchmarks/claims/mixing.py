"""How many blocks must a window have for a blocked order to be as random as a full shuffle?

The rows have 1,000 labels and are sorted by label, which is the worst case; a batch has 1,024 rows. The claim: a
blocked order is no substitute for a file in random order. Refuted if a batch from a window of 1 GiB or less has at
least 95 % as many labels as a fully shuffled batch. If the file is in random order, all orders mix labels equally.

- labels: the number of different labels in a batch, the mean of 40 batches.
- jump: the mean distance between the rows at adjacent positions, divided by n / 3; 1 for a full shuffle.
- moved: the mean distance of a row from its position, divided by n / 3; 1 for a full shuffle.

    python benchmarks/claims/mixing.py
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

from feedline import Blocks, Order
from feedline._src.order.epoch import rows_at

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
    options = parser(__doc__).parse_args()
    results = {}
    print(f"{'rows x window':>13} {'rows in it':>10} {'MiB of 3 KiB':>12} {'labels':>7} {'jump':>6} {'moved':>6}")
    for name, shuffle in SHUFFLES.items():
        results[name] = found = describe_order(shuffle)
        window_rows = N if shuffle is True else shuffle.rows * shuffle.window
        figures = f"{found['labels']:7.1f} {found['jump']:6.2f} {found['moved']:6.2f}"
        print(f"{name:>13} {window_rows:10,} {window_rows * 3 / 1024:12,.0f} {figures}")
    save("mixing", options, results=results)


if __name__ == "__main__":
    main()
