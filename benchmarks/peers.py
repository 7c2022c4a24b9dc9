"""How many rows per second does each loader deliver to eight CPU devices, from the same bytes?

Each loader, including feedline, is also compared with both memory limits. feedline's claim is refuted if the
ratio `feedline ÷ peer` and its whole interval are below 1 for a peer.

    python benchmarks/peers.py --out peers.json     # twenty minutes with 3 rounds, after the first time
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import tyro
from peers_contest import Plan, contest
from peers_entrants import ENTRANTS

_CACHE = "~/.cache/feedline/peers"
_LEAST_ROW_BYTES = 8  # the first eight bytes identify a row
_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Peers:
    """Measure every loader on the same bytes, alternately, on eight CPU devices.

    Each entrant runs in its own process and environment. Each is measured once a round, and stopped
    between its rounds. First it must deliver one epoch of a small file, whose rows are compared with the
    file. An entrant that cannot run is reported with its error.

    Attributes:
      gib: size of the data, of which every entrant holds a copy while it is measured.
      row_bytes: sizes of rows to measure.
      batch_mib: size of a batch.
      rounds: how often each entrant is measured.
      seconds: duration of each measurement; at least two batches are taken.
      warm_up_s: duration of the warm-up before each measurement.
      only: names of the entrants. Empty: all.
      environments: folder for the entrants' environments, some GB. "none": use this interpreter, for the
        entrants whose requirements it has.
      work: folder for the data, also in the peers' own formats: gib × (1 + 2 × the number of row sizes).
      quick: 1/32 GiB, batches of 1 MiB, 2 rounds of 0.2 s: only to check that it runs.
      json: print the result as one object on the last line of standard output.
      out: file for the same object.
    """

    gib: float = 1.0
    row_bytes: tuple[int, ...] = (256, 3072)
    batch_mib: int = 16
    rounds: int = 5
    seconds: float = 1.2
    warm_up_s: float = 0.8
    only: tuple[str, ...] = ()
    environments: str = f"{_CACHE}/environments"
    work: Path = Path(f"{_CACHE}/work")
    quick: bool = False
    json: bool = False
    out: Path | None = None

    def run(self) -> int:
        """Measure, print and save. Returns the exit code: 1 if an entrant could not be measured.

        Raises:
          ValueError: an option is wrong.
        """
        self.check()
        result = contest(self.sized().plan())
        text = json.dumps(result)
        if self.out is not None:
            self.out.write_text(text + "\n")
        if self.json:
            print(text)
        return 1 if result["failures"] else 0

    def check(self) -> None:
        """Check that the options fit together.

        Raises:
          ValueError: an option is wrong.
        """
        unknown = sorted(set(self.only) - set(ENTRANTS))
        if unknown:
            raise ValueError(f"--only takes {', '.join(ENTRANTS)}, got {', '.join(unknown)}")
        for name in ("gib", "batch_mib", "rounds", "seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        for size in self.row_bytes:
            batch = self.batch_mib * 2**20
            if size < _LEAST_ROW_BYTES or size * _DEVICES > batch or batch > self.gib * 2**30:
                raise ValueError(
                    f"a row must have {_LEAST_ROW_BYTES} bytes at least, a batch {_DEVICES} rows and the data one "
                    f"batch; got --row-bytes {size}, --batch-mib {self.batch_mib} and --gib {self.gib:g}"
                )

    def sized(self) -> Peers:
        """These options, with the sizes of --quick if it is given."""
        if not self.quick:
            return self
        return dataclasses.replace(self, gib=1 / 32, batch_mib=1, rounds=2, seconds=0.2, warm_up_s=0.1)

    def plan(self) -> Plan:
        """These options as a `Plan`."""
        own_environments = self.environments != "none"
        return Plan(
            names=tuple(name for name in ENTRANTS if name in (self.only or ENTRANTS)),
            data_bytes=int(self.gib * 2**30),
            row_bytes=self.row_bytes,
            batch_bytes=self.batch_mib * 2**20,
            rounds=self.rounds,
            seconds=self.seconds,
            warm_up_s=self.warm_up_s,
            environments=Path(self.environments).expanduser().absolute() if own_environments else None,
            work=self.work.expanduser().absolute(),
        )


if __name__ == "__main__":
    sys.exit(tyro.cli(Peers).run())
