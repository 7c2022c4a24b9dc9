"""Draws the report on a feed whose reading is slower than training: 20 ms a batch, for a loop of 5 ms.

python benchmarks/claims/report.py report.svg
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import feedline


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
    report.save(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
