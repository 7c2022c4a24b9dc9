"""How many rows per second does each loader deliver to eight CPU devices, from the same bytes?

Each loader, including feedline, is also compared with both memory limits. feedline's claim is refuted if the
ratio `feedline ÷ peer` and its whole interval are below 1 for a peer.

    python benchmarks/peers/peers.py --out peers.json     # twenty minutes with 3 rounds, after the first time

The data takes --gib × (1 + 2 × the number of row sizes) in --work, and each entrant holds a copy in memory. Before
the rounds, each must deliver one epoch of a small file, whose rows are compared with the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.contest import DEVICES, Case, above_0, contest, parser, saved, thread_count
from peers.standings import ENTRANTS, standings, table

_LEAST_ROW_BYTES = 8  # the first eight bytes identify a row
_CHECKED_BYTES = 32 << 20
"""A whole epoch of a file of this size is compared, in batches of 1 MiB; of the data itself, only two batches."""
_CHECKED_BATCH_BYTES = 1 << 20


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, and the sizes that follow from them; with --quick 1/32 GiB, and 2 rounds of 0.2 s."""
    asked = parser(__doc__ or "", ENTRANTS, seconds=1.2, warm_up_s=0.8)
    asked.add_argument("--gib", type=above_0, default=1.0, help="size of the data")
    asked.add_argument("--row-bytes", type=int, nargs="+", default=[256, 3072], help="sizes of rows to measure")
    asked.add_argument("--batch-mib", type=int, default=16, help="size of a batch")
    options = asked.parse_args(arguments)
    options.only = [name for name in ENTRANTS if name in options.only]
    if options.quick:
        small = {"gib": 1 / 32, "batch_mib": 1, "rounds": 2, "seconds": 0.2, "warm_up_s": 0.1}
        options = argparse.Namespace(**{**vars(options), **small})
    options.data_bytes, options.batch_bytes = int(options.gib * 2**30), options.batch_mib * 2**20
    for size in options.row_bytes:
        if not (
            size >= _LEAST_ROW_BYTES
            and size * DEVICES <= options.batch_bytes
            and options.batch_mib <= options.gib * 1024
        ):
            asked.error(
                f"a row must have {_LEAST_ROW_BYTES} bytes at least, a batch {DEVICES} rows and the data one "
                f"batch; got --row-bytes {size}, --batch-mib {options.batch_mib} and --gib {options.gib:g}"
            )
    return options


def compete(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print: one case for each size of rows. The result is that of `contest`."""
    data, small = random_bytes(options.work, options.data_bytes), random_bytes(options.work, _CHECKED_BYTES)
    cases = []
    for row_bytes in options.row_bytes:
        task = rows_task(data, row_bytes, options.batch_bytes)
        checked = rows_task(small, row_bytes, _CHECKED_BATCH_BYTES)
        cases.append(Case(row_bytes, task, ((checked, None), (task, 2))))
    return contest("peers", options, cases, standings, table)


def rows_task(data: Path, row_bytes: int, batch_bytes: int) -> dict[str, Any]:
    """The fields of `Rows` in peers/tasks/rows_task.py. A batch has as many rows as fit on the devices."""
    return {
        "kind": "rows",
        "file": str(data),
        "row_bytes": row_bytes,
        "batch_rows": batch_bytes // row_bytes // DEVICES * DEVICES,
        "threads": thread_count(),
        "folder": f"{data.stem}-{row_bytes}",
    }


def random_bytes(folder: Path, size: int) -> Path:
    """A .npy of uint8[size], kept for the next run; random, so that rows differ and cannot be compressed."""
    path = folder / f"bytes-{size}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.save(file, np.random.default_rng(0).integers(256, size=size, dtype=np.uint8))
        part.rename(path)
    return path


if __name__ == "__main__":
    given = options_of()
    sys.exit(saved(compete(given), given))
