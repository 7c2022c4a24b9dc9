"""How good a model is on a test set, each of whose rows counts exactly once."""

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
      rows: rows that counted.
      correct: of them, rows whose highest score was their label's.
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
    """Sum over all batches; rows whose leaf `valid` is False, which pad the last batch, count for nothing.

    With several processes all of them call it, on their parts of the same batches, and all get the same.
    Batches are summed on the devices, exactly, and added up on the host, where integers have no end.

    Args:
      sums: (parameters, batch) → `Sums`, as in `modes.Compiled`.
      batches: one pass over the test set.

    Raises:
      ValueError: no row counted.
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
    """Each result on the host, fetched once the next one is under way, so that the device never idles."""
    last: Sums | None = None
    for result in results:
        if last is not None:
            yield jax.device_get(last)
        last = result
    if last is not None:
        yield jax.device_get(last)
