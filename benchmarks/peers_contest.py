"""Runs the peers benchmark: checks the rows of every entrant once, then measures each in every round."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers_entrants import Entrant
from peers_environments import CannotRun
from peers_standings import standings, table

from feedline.bench.machine import describe

_CHECKED_BYTES = 32 << 20
"""A whole epoch of a file of this size is compared, in batches of 1 MiB; of the data itself two batches."""
_CHECKED_BATCH_BYTES = 1 << 20
_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured. `peers.Peers` describes the fields."""

    names: tuple[str, ...]
    data_bytes: int
    row_bytes: tuple[int, ...]
    batch_bytes: int
    rounds: int
    seconds: float
    warm_up_s: float
    environments: Path | None
    work: Path


def contest(plan: Plan) -> dict[str, Any]:
    """Run the whole benchmark, and print the results of each row size.

    Returns:
      JSON values: machine, plan, entrants (settings and versions), failures {name: why}, checks,
      samples (each round of each entrant), standings {row_bytes: ...}.
    """
    machine = describe()
    result: dict[str, Any] = {
        "benchmark": "peers",
        "machine": machine,
        "plan": json.loads(json.dumps(dataclasses.asdict(plan), default=str)),
        "entrants": {},
        "failures": {},
        "checks": [],
        "samples": [],
        "standings": {},
    }
    print(f"{machine['processor']}, {machine['cores']} cores; columns by {machine['columns']}", flush=True)
    plan.work.mkdir(parents=True, exist_ok=True)
    data = random_bytes(plan.work, plan.data_bytes)
    with contextlib.ExitStack() as stack:
        entrants: dict[str, Entrant] = {}
        for name in plan.names:
            with _failing(name, entrants, result["failures"]):
                entrants[name] = Entrant(name, plan.environments, plan.work, min(16, machine["cores"]))
                stack.callback(entrants[name].close)
                result["checks"] += _checks(entrants[name], plan, data)
                result["entrants"][name] = entrants[name].describe()
        for row_bytes in plan.row_bytes:
            for k in range(plan.rounds):
                for name in list(entrants)[:: -1 if k % 2 else 1]:  # reversed in every second round: drift cancels
                    with _failing(name, entrants, result["failures"]):
                        found = entrants[name].measure(
                            data, row_bytes, batch_rows(plan.batch_bytes, row_bytes), plan.warm_up_s, plan.seconds
                        )
                        result["samples"].append({"entrant": name, "row_bytes": row_bytes, "round": k, **found})
            result["standings"][str(row_bytes)] = standings(result["samples"], row_bytes)
            print(table(result, row_bytes), flush=True)
    result["load_afterwards"] = describe()["load"]
    return result


@contextlib.contextmanager
def _failing(name: str, entrants: dict[str, Entrant], failures: dict[str, str]) -> Iterator[None]:
    """Record an entrant that cannot run, and remove it; the others continue."""
    try:
        yield
    except CannotRun as error:
        entrants.pop(name, None)
        failures[name] = str(error)
        print(f"{name:<20} CANNOT BE MEASURED: {error}", flush=True)


def _checks(entrant: Entrant, plan: Plan, data: Path) -> list[dict[str, Any]]:
    """Check the rows of an entrant: an epoch of a small file, and the first batches of the data."""
    small = random_bytes(plan.work, _CHECKED_BYTES)
    found = []
    for row_bytes in plan.row_bytes:
        for file, batch_bytes, limit in ((small, _CHECKED_BATCH_BYTES, None), (data, plan.batch_bytes, 2)):
            check = entrant.check(file, row_bytes, batch_rows(batch_bytes, row_bytes), limit)
            found.append({"entrant": entrant.name, "row_bytes": row_bytes, "batches": limit or "epoch", **check})
    wrong = [check for check in found if not check["right"]]
    print(f"{entrant.name:<20} {f'WRONG ROWS: {wrong}' if wrong else 'delivers every row once'}", flush=True)
    return found


def batch_rows(batch_bytes: int, row_bytes: int) -> int:
    """Rows in a batch: as many as fit, a multiple of the devices.

    Example:
      >>> batch_rows(16 << 20, 3072)
      5456
    """
    return batch_bytes // row_bytes // _DEVICES * _DEVICES


def random_bytes(folder: Path, size: int) -> Path:
    """A .npy of uint8[size], kept for the next run; random, so that rows differ and cannot be compressed."""
    path = folder / f"bytes-{size}.npy"
    if not path.exists():
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.save(file, np.random.default_rng(0).integers(256, size=size, dtype=np.uint8))
        part.rename(path)
    return path
