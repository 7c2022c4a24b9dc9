"""`Diagnosis`: what each stage costs a training loop, measured by leaving stages out."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from feedline._src.listen.words import milliseconds, percent

PHASES = ("as it is", "read again", "placed again", "resident")
"""What the loop is given, one after the other: new rows; the same rows, read and transformed again; the same host
batch, placed again; the same batch, which is on the devices already."""
_MEANING = {
    "fetch": "reading rows that are in no cache yet",
    "preparation": "reading them from the page cache, and the transform",
    "transfer": "placing batches on the devices",
}


@dataclasses.dataclass
class Diagnosis:
    """What each stage costs, as `Feed.diagnose` measures it. Times are seconds a step.

    The stalls are those of DS-Analyzer (Mohan et al., VLDB 2021): each is the time of a step with a stage, less
    that without it.

    Attributes:
      steps_s: the mean time of a step in each phase of `PHASES` that was measured.
      first_batch_s: from the start of the feed to its first batch; None: there was none.
      steps: how many steps were judged in each phase.
    """

    steps_s: dict[str, float] = dataclasses.field(default_factory=dict)
    first_batch_s: float | None = None
    steps: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, phase: str, step_s: float, steps: int) -> None:
        """So many steps of this phase took so long on average."""
        self.steps_s[phase] = step_s
        self.steps[phase] = steps

    @property
    def au(self) -> float | None:
        """Accelerator utilisation: time of a step on the resident batch ÷ time of a step as it is."""
        whole, resident = self.steps_s.get(PHASES[0]), self.steps_s.get(PHASES[-1])
        return None if not whole or resident is None else min(1.0, resident / whole)

    @property
    def stalls_s(self) -> dict[str, float]:
        """Seconds a step of "fetch", "preparation" and "transfer"; "fetch and preparation" where rows cannot be
        read again, as those of streams.
        """
        found, names = {}, list(_MEANING)
        measured = [phase for phase in PHASES if phase in self.steps_s]
        level_s = self.steps_s[measured[-1]] if measured else 0.0
        for slower, faster in reversed(list(itertools.pairwise(measured))):
            between = " and ".join(names[PHASES.index(slower) : PHASES.index(faster)])
            found[between] = max(0.0, self.steps_s[slower] - level_s)
            level_s = max(level_s, self.steps_s[slower])  # so that noise is not counted twice
        return dict(reversed(found.items()))

    def to_dict(self) -> dict[str, Any]:
        """All values, as JSON values."""
        return {**dataclasses.asdict(self), "au": self.au, "stalls_s": self.stalls_s}

    def __str__(self) -> str:
        """The times and stalls as text."""
        if not self.steps_s:
            return "diagnosis: no step was measured"
        whole_s = self.steps_s.get(PHASES[0], 0.0)
        lines = [f"a step takes {milliseconds(whole_s)} ms"]
        if self.au is not None:
            lines[0] += f", and {milliseconds(self.steps_s[PHASES[-1]])} ms without input: AU {percent(self.au)}"
        for name, stall_s in self.stalls_s.items():
            share = percent(stall_s / whole_s) if whole_s else "?"
            meaning = " + ".join(_MEANING[each] for each in name.split(" and "))
            lines.append(f"  {name:<12} {milliseconds(stall_s):>8} ms  {share:>5}  {meaning}")
        if self.first_batch_s is not None:
            lines.append(f"  the first batch came after {self.first_batch_s:.2f} s")
        missing = [phase for phase in PHASES if phase not in self.steps_s]
        if missing:
            lines.append(f"  not measured: {', '.join(missing)}")
        return "\n".join(lines)
