"""What does a mixture cost, compared with a feed over one array of the same rows?

The claim: a mixture of three arrays in memory, with the weights 5 : 3 : 2, delivers batches of 16 MiB at 0.9 times
the rate of one array or more, for rows of 256 B and of 3 KB. Refuted if the median ratio of the rounds is below
0.9. The feed of one array has a second leaf, of int32, because the mixture adds such a leaf. The feeds alternate,
so that a busy moment affects both. The order alone is measured without a claim, on one thread, 65,536 rows a call.

    python benchmarks/claims/mixture.py
"""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.limit import filler
from shared.rounds import alternate, compared
from shared.script import parser, save

import feedline
from claims.core import Computed, on, order_ns, taking

WEIGHTS = {"a": 5, "b": 3, "c": 2}
CASES = [(256, 16 << 20), (256, 4 << 20), (3072, 16 << 20), (3072, 4 << 20)]
"""(bytes of a row, bytes of a batch)."""
CLAIM = 0.9


def beside_one_array(row_bytes, batch_bytes, options):
    rows, batch_size = int(options.gib * 2**30) // row_bytes, batch_bytes // row_bytes // 8 * 8
    data = filler(rows * row_bytes).reshape(rows, row_bytes)
    parts = np.split(data, [rows // 2, rows // 2 + rows * 3 // 10])
    mixture = feedline.Mixture({name: {"x": part} for name, part in zip(WEIGHTS, parts, strict=True)}, WEIGHTS)
    one, sharding = {"x": data, "source": np.zeros(rows, np.int32)}, on(jax.devices())
    with (
        feedline.Feed(one, batch_size, sharding) as alone,
        feedline.Feed(mixture, batch_size, sharding) as mixed,
    ):
        feeds = {"one array": taking(alone, batch_size), "mixture": taking(mixed, batch_size)}
        rates = alternate(feeds, options.rounds, options.seconds)
    return {"row_bytes": row_bytes, "batch_bytes": batch_bytes, "feeds": compared(rates, "one array")}


def main():
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--seconds", type=float, default=1.0, help="of a feed in a round")
    asked.add_argument("--gib", type=float, default=0.5, help="of rows in memory")
    options = asked.parse_args()
    lengths = zip(WEIGHTS, (10**9, 10**8, 10**7), strict=True)
    mixture = feedline.Mixture({name: Computed(count) for name, count in lengths}, WEIGHTS)
    orders = {
        "one source": order_ns(Computed(10**9), options.rounds, order=feedline.Order(7)),
        "mixture": order_ns(mixture, options.rounds),
    }
    print("order, ns a row:", ", ".join(f"{name} {ns:.1f}" for name, ns in orders.items()))
    found = []
    for case in CASES:
        found.append(beside_one_array(*case, options))
        rates = ", ".join(f"{name} {of['median'] / 1e6:.2f} M rows/s" for name, of in found[-1]["feeds"].items())
        print(
            f"rows of {case[0]:>4} B, batches of {case[1] >> 20:>2} MiB: {rates}, ratio "
            f"{found[-1]['feeds']['mixture']['of_limit']:.2f}",
            flush=True,
        )
    large = [each["feeds"]["mixture"]["of_limit"] for each in found if each["batch_bytes"] == 16 << 20]
    print("refuted" if min(large) < CLAIM else "not refuted")
    save("mixture", options, order_ns=orders, feeds=found)


if __name__ == "__main__":
    main()
