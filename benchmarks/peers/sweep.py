"""Which of the settings in its reader's SWEEP is fastest for each entrant of the peers benchmark?

An entrant's own settings are refuted if another one of its SWEEP is faster at most row sizes.

    python benchmarks/peers_sweep.py --only spdl torch_batched --out sweep.json
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import tyro
from peers import Peers
from peers_contest import Case, Plan
from peers_entrants import Entrant
from peers_environments import CannotRun

from feedline._src.tools.bench.machine import describe


@dataclasses.dataclass(frozen=True)
class Sweep(Peers):
    """Measure each entrant with every setting of its SWEEP, alternately. Options as in the peers benchmark."""

    def compete(self) -> dict[str, Any]:
        """Measure all settings; "failures" are the entrants with a setting that failed."""
        return swept(self.plan(), self.cases())


def swept(plan: Plan, cases: Sequence[Case]) -> dict[str, Any]:
    """Measure every setting of all entrants in all cases."""
    machine = describe()
    found = [setting for name in plan.names for setting in _of_entrant(name, plan, cases)]
    failures = {setting["entrant"]: setting["failure"] for setting in found if "failure" in setting}
    return {"benchmark": "sweep", "machine": machine, "settings": found, "failures": failures}


def _of_entrant(name: str, plan: Plan, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Measure every setting of one entrant in every case. A setting that fails is recorded, and left out."""
    try:
        entrant = Entrant(name, plan.environments, plan.work)
    except CannotRun as error:
        print(f"{name}: {error}", flush=True)
        return [{"entrant": name, "failure": str(error)}]
    found: list[dict[str, Any]] = []
    for case in cases:
        entrant.check(*case.checks[-1])
        own = [{"entrant": name, "row_bytes": case.row_bytes, "settings": s} for s in entrant.describe()["sweep"]]
        for _ in range(plan.rounds):
            for setting in own:
                if "failure" in setting:
                    continue
                try:
                    sample = entrant.measure(case.task, plan.warm_up_s, plan.seconds, setting["settings"])
                    setting.setdefault("rows_per_s", []).append(sample["rows_per_s"])
                except CannotRun as error:
                    setting["failure"] = str(error)
                    entrant = Entrant(name, plan.environments, plan.work)
        for setting in own:
            rate = setting.get("failure") or f"{statistics.median(setting['rows_per_s']):,.0f} rows/s"
            print(f"{name:<20} {case.row_bytes:>6} B  {rate:<18} {setting['settings']}", flush=True)
        found += own
    entrant.close()
    return found


if __name__ == "__main__":
    sys.exit(tyro.cli(Sweep).run())
