"""Which of the settings in its reader's SWEEP is fastest for each entrant of the peers benchmark?

An entrant's own settings are refuted if another one of its SWEEP is faster at most row sizes.

    python benchmarks/peers_sweep.py --only spdl torch_batched --out sweep.json
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from typing import Any

import tyro
from peers import Peers
from peers_contest import Plan, batch_rows, random_bytes
from peers_entrants import Entrant
from peers_environments import CannotRun

from feedline.bench.machine import describe


@dataclasses.dataclass(frozen=True)
class Sweep(Peers):
    """Measure each entrant with every setting of its SWEEP, alternately. Options as in the peers benchmark."""

    def run(self) -> int:
        """Measure, print and save. Returns the exit code: 1 if a setting failed."""
        self.check()
        plan = self.sized().plan()
        machine = describe()
        plan.work.mkdir(parents=True, exist_ok=True)
        found = [case for name in plan.names for case in _swept(name, plan, machine["cores"])]
        text = json.dumps({"benchmark": "sweep", "machine": machine, "settings": found})
        if self.out is not None:
            self.out.write_text(text + "\n")
        if self.json:
            print(text)
        return 1 if any("failure" in case for case in found) else 0


def _swept(name: str, plan: Plan, cores: int) -> list[dict[str, Any]]:
    """Measure every setting of one entrant at every row size. A setting that fails is recorded, and left out."""
    try:
        entrant = Entrant(name, plan.environments, plan.work, min(16, cores))
    except CannotRun as error:
        print(f"{name}: {error}", flush=True)
        return [{"entrant": name, "failure": str(error)}]
    data = random_bytes(plan.work, plan.data_bytes)
    found: list[dict[str, Any]] = []
    for row_bytes in plan.row_bytes:
        rows = batch_rows(plan.batch_bytes, row_bytes)
        cases = [{"entrant": name, "row_bytes": row_bytes, "settings": s} for s in entrant.describe()["sweep"]]
        entrant.check(data, row_bytes, rows, 1)
        for _ in range(plan.rounds):
            for case in cases:
                if "failure" in case:
                    continue
                try:
                    sample = entrant.measure(data, row_bytes, rows, plan.warm_up_s, plan.seconds, case["settings"])
                    case.setdefault("rows_per_s", []).append(sample["rows_per_s"])
                except CannotRun as error:
                    case["failure"] = str(error)
                    entrant = Entrant(name, plan.environments, plan.work, min(16, cores))
        for case in cases:
            result = case.get("failure") or f"{statistics.median(case['rows_per_s']) / 1e6:.3f} M rows/s"
            print(f"{name:<20} {row_bytes:>5} B  {result:<18} {case['settings']}", flush=True)
        found += cases
    entrant.close()
    return found


if __name__ == "__main__":
    sys.exit(tyro.cli(Sweep).run())
