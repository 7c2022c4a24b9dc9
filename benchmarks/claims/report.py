"""Draws the report on a feed whose reading is slower than training: 20 ms a batch, for a loop of 5 ms.

    python benchmarks/claims/report.py report.svg

Needs matplotlib, which `pip install '.[bench]'` brings. `feed.report().save("report.png")` draws the same.
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np

import feedline
from feedline._src.observe.picture import figure
from feedline._src.observe.view import View


class SlowStorage:
    """Rows that take 20 ms a batch to read, as from a disk that is far away."""

    spec = jax.ShapeDtypeStruct((28, 28), np.uint8)
    identity: dict[str, Any] = {"kind": "slow storage"}  # noqa: RUF012  a `RowSource` has it on each object

    def __len__(self) -> int:
        return 1_000_000

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        time.sleep(0.020)
        out[:] = (rows % 256)[:, None, None]

    def close(self) -> None:
        pass


def main(path: Path) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with feedline.Feed(SlowStorage(), 64, sharding, reading=feedline.Reading(threads=2)) as feed:
        for _ in range(200):
            next(feed)
            time.sleep(0.005)  # the training step
        report = feed.report()
    print(report)
    matplotlib.rcParams["svg.hashsalt"] = "feedline"  # the same report gives the same bytes
    figure(View.of(report.verdict, report.to_dict())).savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
