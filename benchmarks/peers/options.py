"""The options that the benchmarks of peers share, and what is run with them."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from peers.contest import Case, Plan

CACHE = "~/.cache/feedline/peers"


@dataclasses.dataclass(frozen=True)
class Options(abc.ABC):
    """Each entrant runs in its own process and environment, is measured once a round, and is stopped between.

    Attributes:
      rounds: how often each entrant is measured.
      seconds: duration of each measurement; at least two batches are taken.
      warm_up_s: duration of the warm-up before each measurement.
      only: names of the entrants. Empty: all.
      environments: folder for the entrants' environments, some GB. "none": use this interpreter, for the
        entrants whose requirements it has.
      work: folder for the data.
      quick: little data, small batches and short rounds: only to check that it runs.
      json: print the result as one object on the last line of standard output.
      out: file for the same object.
    """

    entrants: ClassVar[Sequence[str]]

    rounds: int = 5
    seconds: float = 1.2
    warm_up_s: float = 0.8
    only: tuple[str, ...] = ()
    environments: str = f"{CACHE}/environments"
    work: Path = Path(f"{CACHE}/work")
    quick: bool = False
    json: bool = False
    out: Path | None = None

    @abc.abstractmethod
    def sized(self) -> Options:
        """These options, with the sizes of --quick if it is given."""

    @abc.abstractmethod
    def sizes(self) -> dict[str, Any]:
        """The sizes of the data, for the result."""

    @abc.abstractmethod
    def cases(self) -> list[Case]:
        """What is measured; makes its data."""

    @abc.abstractmethod
    def compete(self) -> dict[str, Any]:
        """Run the benchmark with these sizes, and print its results. Returns a dict with "failures"."""

    def run(self) -> int:
        """Measure, print and save. Returns the exit code: 1 if an entrant could not be measured.

        Raises:
          ValueError: an option is wrong.
        """
        self.check()
        result = self.sized().compete()
        self.save(result)
        return 1 if result["failures"] else 0

    def save(self, result: dict[str, Any]) -> None:
        """Write the result to where it is wanted."""
        text = json.dumps(result)
        if self.out is not None:
            self.out.write_text(text + "\n")
        if self.json:
            print(text)

    def check(self) -> None:
        """Check that the options fit together.

        Raises:
          ValueError: an option is wrong.
        """
        unknown = sorted(set(self.only) - set(self.entrants))
        if unknown:
            raise ValueError(f"--only takes {', '.join(self.entrants)}, got {', '.join(unknown)}")
        for name in ("rounds", "seconds"):
            self.check_positive(name)

    def check_positive(self, name: str) -> None:
        """Check that an option is above 0.

        Raises:
          ValueError: it is not.
        """
        if getattr(self, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")

    def plan(self) -> Plan:
        """These options as a `Plan`."""
        own_environments = self.environments != "none"
        return Plan(
            names=tuple(name for name in self.entrants if name in (self.only or self.entrants)),
            rounds=self.rounds,
            seconds=self.seconds,
            warm_up_s=self.warm_up_s,
            environments=Path(self.environments).expanduser().absolute() if own_environments else None,
            work=self.work.expanduser().absolute(),
            sizes=self.sizes(),
        )
