"""Runs a benchmark of peers: checks the batches of every entrant once, then measures each in every round."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from feedline._src.cluster.cores import own_cores
from feedline._src.tools.bench.machine import describe
from peers.entrants import Entrant
from peers.environments import CannotRun

DEVICES = 8
"""The CPU devices of each entrant."""
Standings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who is measured, and how long. See `peers.options.Options`; `sizes` are those of the data."""

    names: tuple[str, ...]
    rounds: int
    seconds: float
    warm_up_s: float
    environments: Path | None
    work: Path
    sizes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """What all entrants read in turn.

    Attributes:
      row_bytes: size of a row in a batch. No two cases of a benchmark have the same.
      task: the fields of a task in peers/tasks/, and its "kind".
      checks: tasks of which every entrant is checked before, each with a number of batches; None: a whole epoch.
    """

    row_bytes: int
    task: dict[str, Any]
    checks: tuple[tuple[dict[str, Any], int | None], ...]


def thread_count() -> int:
    """How many threads an entrant may use."""
    return min(16, own_cores())


def contest(
    benchmark: str,
    plan: Plan,
    cases: Sequence[Case],
    standings: Callable[[Sequence[dict[str, Any]], int], Standings],
    table: Callable[[dict[str, Any], int], str],
) -> dict[str, Any]:
    """Measure all entrants in all cases, and print the results of each case.

    Args:
      standings: (samples, row_bytes) → medians and ratios of a case.
      table: (result, row_bytes) → the standings of a case as text.

    Returns:
      JSON values: machine, plan, entrants (settings and versions), failures {name: why}, checks,
      samples (each round of each entrant), standings {row_bytes: ...}.
    """
    machine = describe()
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "sizes"}
    result: dict[str, Any] = {
        "benchmark": benchmark,
        "machine": machine,
        "plan": json.loads(json.dumps(fields | plan.sizes, default=str)),
        "entrants": {},
        "failures": {},
        "checks": [],
        "samples": [],
        "standings": {},
    }
    print(f"{machine['processor']}, {machine['cores']} cores; columns by {machine['columns']}", flush=True)
    with contextlib.ExitStack() as stack:
        entrants: dict[str, Entrant] = {}
        for name in plan.names:
            with _failing(name, entrants, result["failures"]):
                entrants[name] = Entrant(name, plan.environments, plan.work)
                stack.callback(entrants[name].close)
                result["checks"] += _checks(entrants[name], cases)
                result["entrants"][name] = entrants[name].describe()
        for case in cases:
            for k in range(plan.rounds):
                for name in list(entrants)[:: -1 if k % 2 else 1]:  # reversed in every second round: drift cancels
                    with _failing(name, entrants, result["failures"]):
                        found = entrants[name].measure(case.task, plan.warm_up_s, plan.seconds)
                        result["samples"].append(
                            {"entrant": name, "row_bytes": case.row_bytes, "round": k, **found}
                        )
            result["standings"][str(case.row_bytes)] = standings(result["samples"], case.row_bytes)
            print(table(result, case.row_bytes), flush=True)
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


def _checks(entrant: Entrant, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Check the batches of an entrant."""
    found = []
    for case in cases:
        for task, limit in case.checks:
            check = entrant.check(task, limit)
            found.append(
                {"entrant": entrant.name, "row_bytes": case.row_bytes, "batches": limit or "epoch", **check}
            )
    wrong = [check for check in found if not check["right"]]
    print(f"{entrant.name:<20} {f'WRONG ROWS: {wrong}' if wrong else 'delivers every row once'}", flush=True)
    return found
