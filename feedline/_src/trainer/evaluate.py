"""Evaluation of a model on a test set, in which each row counts exactly once."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import jax

from feedline._src.trainer.modes import Measure
from feedline._src.trainer.task import Batch, Metrics, Params

_AHEAD = 2  # batches that may run while the next one is asked for


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over a test set.

    Attributes:
      rows: rows counted.
      metrics: "loss" and what the loss function measures besides: means over these rows.
    """

    rows: int
    metrics: Mapping[str, float]


class Evaluating:
    """An evaluation on all batches. Rows whose leaf `valid` is False, which pad the last batch, are not counted.

    With several processes all of them make it with the same global batches, and get the same result. Each batch is
    averaged on the devices; the averages are weighted by their rows and added on the host. All but the last
    two are waited for, so training may go on while those run.

    Args:
      measure: (params, batch) → (metrics, rows), as in `modes.Program`.
      batches: one pass over the test set.
    """

    def __init__(
        self,
        measure: Measure,
        params: Params,
        batches: Iterable[Batch],
    ) -> None:
        self._rows = 0
        self._sums: dict[str, float] = {}
        self._running: collections.deque[tuple[Metrics, jax.Array]] = collections.deque()
        for batch in batches:
            self._running.append(measure(params, batch))
            self._add(all_but=_AHEAD)

    def result(self) -> Evaluation:
        """Wait for the last batches. ValueError if there was no row to count."""
        self._add(all_but=0)
        if not self._rows:
            raise ValueError("an evaluation needs at least one row that counts, and the batches had none")
        names = ["loss", *(name for name in self._sums if name != "loss")]  # jit sorts them
        return Evaluation(self._rows, {name: self._sums[name] / self._rows for name in names})

    def _add(self, all_but: int) -> None:
        while len(self._running) > all_but:
            metrics, rows = jax.device_get(self._running.popleft())
            for name, mean in metrics.items():
                if rows:  # the mean of no row may be NaN
                    self._sums[name] = self._sums.get(name, 0.0) + float(mean) * int(rows)
            self._rows += int(rows)
