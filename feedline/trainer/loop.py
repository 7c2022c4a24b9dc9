"""The training loop: runs the step on every batch, at most two steps ahead of the host, and measures."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import jax

from feedline.errors import FeedError
from feedline.trainer.learner import Batch, State
from feedline.trainer.modes import Step

_AHEAD = 2  # steps that may run while the next batch is asked for: enough to hide dispatch, but few, so that
# the time in `next` is time waiting for input, and the number of batches in use is bounded
_UNCHECKED = 100
"""How many losses are kept on the devices at the most: the last is fetched then, even if no report is due."""


class NotFinite(FeedError):
    """The loss is not finite. Once parameters are not finite, later steps cannot repair them.

    Attributes:
      step: the first step whose loss is not finite, counted in this loop from 1.
      loss: the loss of that step.
    """

    def __init__(self, step: int, loss: float) -> None:
        self.step = step
        self.loss = loss
        super().__init__(f"the loss is {loss} at step {step:,}, the first that is no finite number", stage="train")


@dataclasses.dataclass(frozen=True)
class Progress:
    """The steps done so far, and their times, from the end of the first step, which compiles.

    Attributes:
      step: steps finished.
      rows: rows trained on.
      loss: mean loss of the last finished step.
      elapsed_s: wall time.
      elapsed_rows: rows finished in that time; 0 after the first step.
      wait_s: the part of the wall time spent in the iterator, waiting for input.
    """

    step: int
    rows: int
    loss: float
    elapsed_s: float
    elapsed_rows: int
    wait_s: float

    @property
    def rows_per_s(self) -> float:
        return self.elapsed_rows / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that was spent waiting for input, 0 to 1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


def train(
    step: Step,
    state: State,
    batches: Iterable[Batch],
    *,
    report: Callable[[Progress], None] | None = None,
    report_every_s: float = 0.5,
    after_step: Callable[[State, jax.Array], None] | None = None,
) -> tuple[State, Progress]:
    """Run `step` on every batch. Returns the last state and the progress.

    At most two steps run while the host asks for a batch. A loss is fetched only every `report_every_s`, and every
    hundred steps, after its step is done; no other data moves between host and devices. Each fetch checks that the
    loss is finite; if it is not, the losses since the previous fetch show which step was the first.

    Args:
      step: (state, batch) → (state, loss), as in `modes.Compiled`.
      batches: a finite iterable; cut an endless one with `itertools.islice`.
      report: called after the first step, every `report_every_s`, and at the end, in this thread.
      after_step: called with each new state and the loss, before the next batch is asked for, so that
        iterator and state are at the same step. The next step donates the state.

    Raises:
      ValueError: there was no batch.
      NotFinite: the loss is not finite.
    """
    meter = _Meter(iter(batches))
    running: collections.deque[tuple[jax.Array, int]] = collections.deque()
    report_at_s = 0.0
    for batch in meter:
        state, loss = step(state, batch)
        running.append((loss, len(batch["label"])))
        if after_step:
            after_step(state, loss)
        while len(running) > (_AHEAD if meter.steps else 0):
            meter.finish(*running.popleft())
        if time.perf_counter() >= report_at_s:
            progress = meter.progress()
            if report:
                report(progress)
            report_at_s = time.perf_counter() + report_every_s
    while running:
        meter.finish(*running.popleft())
    if not meter.steps:
        raise ValueError(
            "training needs at least one batch, and the iterator gave none; see its rows and remainder"
        )
    progress = meter.progress()
    if report:
        report(progress)
    return state, progress


class _Meter:
    """Passes the batches on, and counts their steps, rows and times."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.steps = 0
        self._rows = 0
        self._first_rows = 0
        self._unchecked_losses: list[jax.Array] = []  # of the steps finished since the last call of `progress`
        self._loss = math.nan  # of the last finished step, at the last call of `progress`
        self._started_s = 0.0  # when the first step had finished
        self._finished_s = 0.0
        self._wait_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            asked_s = time.perf_counter()
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            if self.steps:
                self._wait_s += time.perf_counter() - asked_s
            yield batch

    def finish(self, loss: jax.Array, rows: int) -> None:
        """Wait until a step is done, and count it."""
        self._unchecked_losses.append(loss.block_until_ready())
        self._finished_s = time.perf_counter()
        self.steps += 1
        self._rows += rows
        if len(self._unchecked_losses) == _UNCHECKED:
            self._check()
        if self.steps == 1:
            self._first_rows, self._started_s = rows, self._finished_s

    def progress(self) -> Progress:
        """The progress now, with the loss of the last finished step. Raises `NotFinite` if that is not finite."""
        if self._unchecked_losses:
            self._check()
        return Progress(
            step=self.steps,
            rows=self._rows,
            loss=self._loss,
            elapsed_s=self._finished_s - self._started_s,
            elapsed_rows=self._rows - self._first_rows,
            wait_s=self._wait_s,
        )

    def _check(self) -> None:
        """Fetch the last loss, and let go of those before it."""
        self._loss = float(jax.device_get(self._unchecked_losses[-1]))
        if not math.isfinite(self._loss):
            self._raise_for_the_first()
        self._unchecked_losses.clear()

    def _raise_for_the_first(self) -> NoReturn:
        losses = [float(loss) for loss in jax.device_get(self._unchecked_losses)]
        first = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
        raise NotFinite(self.steps - len(losses) + first + 1, losses[first])
