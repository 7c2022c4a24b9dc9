"""Evaluation of a model on a test set, in which each row counts exactly once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from feedline.trainer.learner import Batch, Sums


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Exact counts over a test set.

    Attributes:
      rows: rows counted.
      correct: rows whose highest score is that of their label.
      loss: mean softmax cross entropy.

    Example:
      >>> Evaluation(rows=360, correct=351, loss=0.1).accuracy
      0.975
    """

    rows: int
    correct: int
    loss: float

    @property
    def accuracy(self) -> float:
        """correct / rows, 0 to 1."""
        return self.correct / self.rows


def evaluate(sums: Callable[[Any, Batch], Sums], parameters: Any, batches: Iterable[Batch]) -> Evaluation:
    """Evaluate on all batches. Rows whose leaf `valid` is False, which pad the last batch, are not counted.

    With several processes all of them call it with the same global batches, and get the same result.
    Each batch is summed on the devices; the sums are added on the host, where integers do not overflow.

    Args:
      sums: (parameters, batch) → `Sums`, as in `modes.Compiled`.
      batches: one pass over the test set.

    Raises:
      ValueError: there was no row to count.
    """
    rows, correct, loss = 0, 0, 0.0
    for part in _fetched(sums(parameters, batch) for batch in batches):
        rows += int(part.rows)
        correct += int(part.correct)
        loss += float(part.loss)
    if not rows:
        raise ValueError("an evaluation needs at least one row that counts, and the batches had none")
    return Evaluation(rows, correct, loss / rows)


def _fetched(results: Iterable[Sums]) -> Iterator[Sums]:
    """Fetch each result to the host after the next one is dispatched, so that the device is never idle."""
    last: Sums | None = None
    for result in results:
        if last is not None:
            yield jax.device_get(last)
        last = result
    if last is not None:
        yield jax.device_get(last)
