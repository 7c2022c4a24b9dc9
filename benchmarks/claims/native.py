"""What does the C library gain over the NumPy code that runs without it: for the order, and for gathering rows?

One thread gathers shuffled uint8 rows from 1 GiB of memory into six buffers, one after the other, and places
nothing. Refuted if the C order takes more than 4 ns a row, or if the gather as a feed calls it, which chooses
between cached and streaming stores, is slower than `np.take` or than either kind of stores by more than noise.

- order: ns a row, of 65,536 adjacent positions.
- take, cached, streamed, chosen: GB/s of np.take, of the C gather with each kind of stores, and as in a feed.
- many: GB/s of a feed's gather from 64 arrays, by C and by NumPy.

    python benchmarks/claims/native.py    # two minutes; --quick: seconds
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

from feedline import Blocks, Order
from feedline._src.native.gather import Segments
from feedline._src.native.library import library
from feedline._src.order.blocks import blocked
from feedline._src.order.compiled import rows_at_by_c
from feedline._src.order.permutation import permuted, words
from feedline._src.sources.numpy_gather import NumpyGather
from feedline._src.sources.row_gather import RowGather

ROW_BYTES, BATCH_MIB = (4, 256, 1024, 3072, 12_288, 150_528), (4, 16)
WHOLE = (slice(None),)


def rates(work, amount, rounds):
    """{name: `amount` ÷ the median time} of each function in `work`, called with the number of the round."""
    taken = {name: [] for name in work}
    for i in range(rounds + 1):  # the first round warms up
        for name, call in work.items():
            began = time.perf_counter()
            call(i)
            taken[name].append(time.perf_counter() - began)
    return {name: amount / float(np.median(times[1:])) for name, times in taken.items()}


def of_order(n, shuffle, rounds):
    """ns a row, by C and by NumPy."""
    positions = np.arange(1 << 16)
    order, words_ = Order(shuffle=shuffle), words("order", 0, 0)
    by_numpy = (
        (lambda i: blocked(shuffle, n, 0, 0, positions.view(np.uint64)))
        if isinstance(shuffle, Blocks)
        else (lambda i: permuted(n, words_, positions.view(np.uint64)))
    )
    by_c = lambda i: rows_at_by_c(library(), order, n, 0, positions)  # noqa: E731
    return {name: 1e9 / rate for name, rate in rates({"C": by_c, "NumPy": by_numpy}, 1 << 16, rounds).items()}


def of_gather(row_bytes, batch_mib, data_bytes, rounds):
    """GB/s of each kind of gather."""
    count, n = (batch_mib << 20) // row_bytes, data_bytes // row_bytes
    data = np.ones((n, row_bytes), np.uint8)
    random = np.random.default_rng(0)
    rows = [random.integers(0, n, count) for _ in range(4)]
    buffers = [np.zeros((count, row_bytes), np.uint8) for _ in range(6)]
    one, feed = Segments([data]), RowGather([data])
    pieces = [piece.copy() for piece in np.array_split(data, 64)]
    many, many_by_numpy = RowGather(pieces), NumpyGather(pieces)
    work = {
        "take": lambda i: np.take(data, rows[i % 4], axis=0, out=buffers[i % 6], mode="clip"),
        "cached": lambda i: one.gather(library(), rows[i % 4], WHOLE, buffers[i % 6], stream=False),
        "streamed": lambda i: one.gather(library(), rows[i % 4], WHOLE, buffers[i % 6], stream=True),
        "chosen": lambda i: feed.read(rows[i % 4], WHOLE, buffers[i % 6]),
        "many, C": lambda i: many.read(rows[i % 4], WHOLE, buffers[i % 6]),
        "many, NumPy": lambda i: many_by_numpy.read(rows[i % 4], WHOLE, buffers[i % 6]),
    }
    return {name: rate / 1e9 for name, rate in rates(work, count * row_bytes, rounds).items()}


def main():
    asked = parser(__doc__)
    asked.add_argument("--quick", action="store_true", help="little data and few rounds: only to see that it runs")
    options = asked.parse_args()
    if library() is None:
        raise SystemExit("the C library was not built, or FEEDLINE_PURE_PYTHON=1: there is nothing to compare")
    rounds, data_bytes = (2, 16 << 20) if options.quick else (30, 1 << 30)
    found = {"order": {}, "gather": {}}
    for n in (10**6, 10**9, 10**15):
        for name, shuffle in {"full": True, "blocked": Blocks(4096, 64)}.items():
            found["order"][f"{n:.0e} {name}"] = costs = of_order(n, shuffle, rounds)
            print(f"order, n = {n:.0e}, {name:>7}: " + ", ".join(f"{k} {v:.1f} ns" for k, v in costs.items()))
    for batch_mib in BATCH_MIB[: 1 if options.quick else None]:
        for row_bytes in ROW_BYTES:
            found["gather"][f"{row_bytes} B, {batch_mib} MiB"] = gathers = of_gather(
                row_bytes, batch_mib, data_bytes, rounds
            )
            print(
                f"gather, {row_bytes:7,} B, {batch_mib:2} MiB: "
                + ", ".join(f"{k} {v:.2f}" for k, v in gathers.items())
            )
    save("native", options, **found)


if __name__ == "__main__":
    main()
