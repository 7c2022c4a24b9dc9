"""How many rows per second does each loader deliver to eight CPU devices, from the same bytes?

Each loader, including feedline, is also compared with both memory limits. feedline's claim is refuted if the
ratio `feedline ÷ peer` and its whole interval are below 1 for a peer.

    python benchmarks/peers/peers.py --out peers.json     # twenty minutes with 3 rounds, after the first time
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.contest import DEVICES, Case, contest, thread_count
from peers.entrants import ENTRANTS
from peers.options import Options
from peers.standings import standings, table

_LEAST_ROW_BYTES = 8  # the first eight bytes identify a row
_CHECKED_BYTES = 32 << 20
"""A whole epoch of a file of this size is compared, in batches of 1 MiB; of the data itself two batches."""
_CHECKED_BATCH_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Peers(Options):
    """Measure every loader on the same bytes, alternately, on eight CPU devices.

    Each entrant runs in its own process and environment. Each is measured once a round, and stopped
    between its rounds. First it must deliver one epoch of a small file, whose rows are compared with the
    file. An entrant that cannot run is reported with its error. The data takes gib × (1 + 2 × the number of row
    sizes) in --work, and each entrant holds a copy in memory. With --quick: 1/32 GiB, batches of 1 MiB, and 2
    rounds of 0.2 s.

    Attributes:
      gib: size of the data.
      row_bytes: sizes of rows to measure.
      batch_mib: size of a batch.
    """

    entrants: ClassVar = ENTRANTS

    gib: float = 1.0
    row_bytes: tuple[int, ...] = (256, 3072)
    batch_mib: int = 16

    def check(self) -> None:
        """Check that the options fit together."""
        super().check()
        for name in ("gib", "batch_mib"):
            self.check_positive(name)
        for size in self.row_bytes:
            batch = self.batch_mib * 2**20
            if size < _LEAST_ROW_BYTES or size * DEVICES > batch or batch > self.gib * 2**30:
                raise ValueError(
                    f"a row must have {_LEAST_ROW_BYTES} bytes at least, a batch {DEVICES} rows and the data one "
                    f"batch; got --row-bytes {size}, --batch-mib {self.batch_mib} and --gib {self.gib:g}"
                )

    def sized(self) -> Peers:
        """These options, with the sizes of --quick if it is given."""
        if not self.quick:
            return self
        return dataclasses.replace(self, gib=1 / 32, batch_mib=1, rounds=2, seconds=0.2, warm_up_s=0.1)

    def sizes(self) -> dict[str, Any]:
        """The sizes of data, rows and batches in bytes."""
        return {
            "data_bytes": int(self.gib * 2**30),
            "row_bytes": self.row_bytes,
            "batch_bytes": self.batch_mib * 2**20,
        }

    def cases(self) -> list[Case]:
        """One for each size of rows. Of the data itself two batches are checked, of a small file an epoch."""
        folder = self.plan().work
        data, small = random_bytes(folder, int(self.gib * 2**30)), random_bytes(folder, _CHECKED_BYTES)
        cases = []
        for row_bytes in self.row_bytes:
            task = rows_task(data, row_bytes, self.batch_mib * 2**20)
            cases.append(
                Case(row_bytes, task, ((rows_task(small, row_bytes, _CHECKED_BATCH_BYTES), None), (task, 2)))
            )
        return cases

    def compete(self) -> dict[str, Any]:
        """Run the benchmark; the keys of its result are those of `contest`."""
        return contest("peers", self.plan(), self.cases(), standings, table)


def rows_task(data: Path, row_bytes: int, batch_bytes: int) -> dict[str, Any]:
    """The fields of `Rows` in peers/tasks/rows_task.py."""
    return {
        "kind": "rows",
        "file": str(data),
        "row_bytes": row_bytes,
        "batch_rows": batch_rows(batch_bytes, row_bytes),
        "threads": thread_count(),
        "folder": f"{data.stem}-{row_bytes}",
    }


def batch_rows(batch_bytes: int, row_bytes: int) -> int:
    """Rows in a batch: as many as fit, a multiple of the devices.

    Example:
      >>> batch_rows(16 << 20, 3072)
      5456
    """
    return batch_bytes // row_bytes // DEVICES * DEVICES


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
    sys.exit(tyro.cli(Peers).run())
