"""Cases: functions that run in every process of every topology, and in one process alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import jax

from .launch import Topology


@dataclasses.dataclass(frozen=True)
class Here:
    """Where a case runs.

    Attributes:
      devices: of all processes.
      folder: an empty one, for files of this process and case.
      before: returns what the same case returned in the topology before this one; None in the first topology.
    """

    devices: list[jax.Device]
    folder: Path
    before: Callable[[], Any]


Case = Callable[..., Any]
CASES: dict[str, Callable[[Here], Any]] = {}
"""By name, in the order in which every process runs them."""
RUNS_ON: dict[str, Collection[Topology]] = {}
"""The topologies of the cases that do not run on all topologies."""


def case(*choices: Iterable[str], on: Callable[..., Collection[Topology]] | None = None) -> Callable[[Case], Case]:
    """Register `function(here, *chosen)` as one case for each combination of the choices.

    It runs on the topologies `on(*chosen)`; if `on` is None, on every topology.

    The function returns a tree. Its global arrays are combined from all processes; every other value must be
    equal on all of them, unless it is wrapped as `values.PerProcess`.
    """

    def register(function: Case) -> Case:
        for chosen in itertools.product(*choices):
            name = name_of(function, *chosen)
            CASES[name] = functools.partial(_run, function, chosen)
            if on is not None:
                RUNS_ON[name] = on(*chosen)
        return function

    return register


def name_of(function: Case, *chosen: str) -> str:
    """The name under which `case` registers a function. It can be part of a file name."""
    return "-".join([function.__name__, *chosen])


def _run(function: Case, chosen: tuple[str, ...], here: Here) -> Any:
    return function(here, *chosen)
