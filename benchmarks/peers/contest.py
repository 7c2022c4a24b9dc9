"""Runs a benchmark of peers: checks the batches of every entrant once, then measures each in every round."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from feedline._src.cluster.cores import own_cores
from feedline._src.tools.bench.machine import describe
from peers.entrant import READERS, CannotRun, Entrant, interpreter_for

DEVICES = 8
"""The CPU devices of each entrant."""
CACHE = "~/.cache/feedline/peers"


@dataclasses.dataclass(frozen=True)
class Case:
    """What all entrants read in turn.

    Attributes:
      row_bytes: size of a row in a batch, different in each case of a benchmark.
      task: the fields of a task in peers/tasks/, and its "kind".
      checks: tasks to check each entrant before the measurement, with the number of batches; None: a whole epoch.
    """

    row_bytes: int
    task: dict[str, Any]
    checks: tuple[tuple[dict[str, Any], int | None], ...]


def above_0(text: str) -> float:
    """Parse an option that must be a number above 0."""
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"it must be above 0, got {text}")
    return number


def folder(text: str) -> Path:
    """Parse an option that is the path of a folder."""
    return Path(text).expanduser().absolute()


def parser(doc: str, entrants: Sequence[str], seconds: float, warm_up_s: float) -> argparse.ArgumentParser:
    """A parser of the options that the benchmarks of peers share."""
    asked = argparse.ArgumentParser(description=doc.partition("\n")[0])
    asked.add_argument("--rounds", type=int, choices=range(1, 1000), metavar="N", default=5, help="at least one")
    asked.add_argument(
        "--seconds", type=above_0, default=seconds, help="of each measurement, of two batches or more"
    )
    asked.add_argument("--warm-up-s", type=float, default=warm_up_s, help="before each measurement")
    asked.add_argument("--only", nargs="+", choices=entrants, default=list(entrants), help="the entrants (all)")
    asked.add_argument(
        "--environments",
        type=lambda text: None if text == "none" else folder(text),
        default=folder(f"{CACHE}/environments"),
        help='folder for the entrants\' environments, some GB; "none": all run in this interpreter',
    )
    asked.add_argument("--work", type=folder, default=folder(f"{CACHE}/work"), help="folder for the data")
    asked.add_argument(
        "--quick", action="store_true", help="little data and short rounds, only to check that it runs"
    )
    asked.add_argument("--out", type=Path, help="file for the result, as one JSON object")
    return asked


def thread_count() -> int:
    """How many threads an entrant may use."""
    return min(16, own_cores())


def contest(
    benchmark: str,
    options: argparse.Namespace,
    cases: Sequence[Case],
    standings: Callable[[Sequence[dict[str, Any]], int], dict[str, Any]],
    table: Callable[[dict[str, Any], int], str],
) -> dict[str, Any]:
    """Measure all entrants in all cases. After each case, print its `standings` as a `table`."""
    machine = describe()
    result: dict[str, Any] = {
        "benchmark": benchmark,
        "machine": machine,
        "plan": {key: value for key, value in vars(options).items() if not isinstance(value, Path)},
        "entrants": {},
        "failures": {},
        "checks": [],
        "samples": [],
        "standings": {},
    }
    print(f"{machine['processor']}, {machine['cores']} cores; columns by {machine['columns']}", flush=True)
    with contextlib.ExitStack() as stack:
        entrants: dict[str, Entrant] = {}
        for name in options.only:
            with _failing(name, entrants, result["failures"]):
                interpreter = interpreter_for(READERS / name / "requirements.txt", options.environments)
                entrants[name] = Entrant(name, interpreter, options.work)
                stack.callback(entrants[name].close)
                result["checks"] += _checks(entrants[name], cases)
                result["entrants"][name] = entrants[name].ask("describe")
        for case in cases:
            for k in range(options.rounds):
                for name in list(entrants)[:: -1 if k % 2 else 1]:  # reversed in every second round: drift cancels
                    with _failing(name, entrants, result["failures"]):
                        found = entrants[name].measure(case.task, options.warm_up_s, options.seconds)
                        result["samples"].append(
                            {"entrant": name, "row_bytes": case.row_bytes, "round": k, **found}
                        )
            result["standings"][str(case.row_bytes)] = standings(result["samples"], case.row_bytes)
            print(table(result, case.row_bytes), flush=True)
    result["load_afterwards"] = describe()["load"]
    return result


def saved(result: dict[str, Any], options: argparse.Namespace) -> int:
    """Write the result to --out. Returns the exit code: 1 if an entrant could not be measured."""
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n")
    return 1 if result["failures"] else 0


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
    found = [
        {
            "entrant": entrant.name,
            "row_bytes": case.row_bytes,
            "batches": limit or "epoch",
            **entrant.check(task, limit),
        }
        for case in cases
        for task, limit in case.checks
    ]
    wrong = [check for check in found if not check["right"]]
    print(f"{entrant.name:<20} {f'WRONG ROWS: {wrong}' if wrong else 'delivers every row once'}", flush=True)
    return found
