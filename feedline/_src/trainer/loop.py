"""Loops over batches, at most two ahead of the host: training, which is measured, and evaluation."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from feedline._src.errors import FeedError
from feedline._src.trainer.modes import Measure, Program
from feedline._src.trainer.task import Batch, Metrics, Params, State, rows_in

_IN_FLIGHT = 2
"""Steps that may run while the next batch is asked for: enough to hide dispatch, but few, so that time in `next`
is time waiting for input, and the number of batches in use is bounded."""


class NotFinite(FeedError):
    """The loss is not finite. Once parameters are not finite, later steps cannot repair them.

    Attributes:
      step: the first step whose loss is not finite, counted over all runs from 1.
      loss: the loss of that step.
    """

    def __init__(self, step: int, loss: float) -> None:
        self.step = step
        self.loss = loss
        super().__init__(f"the loss is {loss} at step {step:,}, the first that is not finite", stage="train")


@dataclasses.dataclass(frozen=True)
class Progress:
    """The steps done so far, and their times, from the end of the first step of this run, which compiles.

    Attributes:
      step: steps finished, counted over all runs.
      metrics: of the last finished step: "loss", and what the loss function measures besides.
      resumed: how many of the steps earlier runs had done.
      rows: rows trained on in this run.
      elapsed_s: wall time.
      elapsed_rows: rows finished in that time; 0 after the first step.
      wait_s: the part of the wall time spent in the iterator, waiting for input.
    """

    step: int
    metrics: Mapping[str, float]
    resumed: int
    rows: int
    elapsed_s: float
    elapsed_rows: int
    wait_s: float

    @property
    def loss(self) -> float:
        return self.metrics.get("loss", math.nan)

    @property
    def rows_per_s(self) -> float:
        return self.elapsed_rows / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that was spent waiting for input, 0 to 1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


def train(
    program: Program,
    state: State,
    batches: Iterable[Batch],
    *,
    report: Callable[[Progress], None] | None = None,
    report_every: int = 10,
    guard_transfers: bool = True,
    after_step: Callable[[State, Iterable[jax.Array]], bool | None] | None = None,
) -> tuple[State, Progress]:
    """Run the step on every batch. Returns the last state and the progress.

    At most two calls of the step run while the host asks for a batch. The metrics of `report_every` steps stay on
    the devices and are fetched together, after these steps are done; no other data moves between host and devices.
    Each fetch checks that every loss is finite.

    Args:
      batches: a finite iterable; cut an endless one with `itertools.islice`.
      report: called after the first step, at every multiple of `report_every` steps, and at the end, in this
        thread.
      guard_transfers: make it an error if a step moves an array between host and devices, except the first, whose
        tracing may move constants.
      after_step: called with each new state and the metrics not fetched yet, which can be iterated once, before
        the next batch is asked for, so that iterator and state are at the same step. The next step donates the
        state. If the result is true, no other batch is asked for.

    Raises:
      ValueError: there was no batch, and no step was done before.
      NotFinite: a loss is not finite.
    """
    meter = _Meter(program, int(jax.device_get(state.step)), report_every, report)
    running: collections.deque[tuple[jax.Array, int]] = collections.deque()
    guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # tracing may transfer constants

    def unfetched() -> Iterator[jax.Array]:
        yield from meter.unfetched
        yield from (metrics for metrics, _ in running)

    for batch in meter.timed(iter(batches)):
        rows = rows_in(batch, program.steps_per_call)
        with guard:
            state, metrics = program.step(state, batch)
        running.append((metrics, rows))
        ended = after_step(state, unfetched()) if after_step else False
        while len(running) > (_IN_FLIGHT if meter.progress.rows else 0):
            meter.finish(*running.popleft())
        if guard_transfers:
            guard = jax.transfer_guard("disallow")
        if ended:
            break
    while running:
        meter.finish(*running.popleft())
    if not meter.progress.step:
        raise ValueError(
            "training needs at least one batch, and the iterator gave none; see its rows and remainder"
        )
    meter.fetch()
    return state, meter.progress


def steps_of(metrics: Iterable[jax.Array]) -> list[list[float]]:
    """The metrics of each step, fetched from those of some calls; the loss is the first."""
    calls = jax.device_get(list(metrics))
    return [step for call in calls for step in call.reshape(-1, call.shape[-1]).tolist()]


def crosses(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after].

    Example:
      >>> crosses(8, 10, 10), crosses(10, 12, 10)
      (True, False)
    """
    return before // every != after // every


class _Meter:
    """Counts steps, rows and times; fetches metrics, checks and reports them.

    Attributes:
      progress: the finished steps, with the metrics of the last step fetched.
      unfetched: the metrics of finished calls, until they are fetched.
    """

    def __init__(
        self, program: Program, resumed: int, report_every: int, report: Callable[[Progress], None] | None
    ) -> None:
        self.progress = Progress(resumed, {}, resumed, 0, 0.0, 0, 0.0)
        self.unfetched: list[jax.Array] = []
        self._program = program
        self._report_every = report_every
        self._report = report
        self._started_s = 0.0  # when the first step had finished

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches. After the first step, time spent in the iterator is counted."""
        while True:
            asked_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self.progress.rows:
                self._set(wait_s=self.progress.wait_s + time.perf_counter() - asked_s)
            yield batch

    def finish(self, metrics: jax.Array, rows: int) -> None:
        """Wait until a call of the step is done, count it, and fetch metrics if it is time."""
        self.unfetched.append(metrics.block_until_ready())
        now_s, before = time.perf_counter(), self.progress
        self._set(step=before.step + self._program.steps_per_call, rows=before.rows + rows)
        if before.rows:
            self._set(elapsed_s=now_s - self._started_s, elapsed_rows=before.elapsed_rows + rows)
        else:
            self._started_s = now_s
        if not before.rows or crosses(before.step, self.progress.step, self._report_every):
            self.fetch()

    def fetch(self) -> None:
        """Fetch and report the metrics since the last fetch. Raises `NotFinite` for the first such loss."""
        if not self.unfetched:
            return
        fetched = steps_of(self.unfetched)
        for step, values in enumerate(fetched, self.progress.step + 1 - len(fetched)):
            if not math.isfinite(values[0]):
                raise NotFinite(step, values[0])
        self.unfetched.clear()
        self._set(metrics=dict(zip(self._program.metrics, fetched[-1], strict=True)))
        if self._report is not None:
            self._report(self.progress)

    def _set(self, **counted: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **counted)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over a test set.

    Attributes:
      rows: rows counted.
      metrics: "loss" and what the loss function measures besides: means over these rows.
    """

    rows: int
    metrics: Mapping[str, float]


def evaluate(measure: Measure, params: Params, batches: Iterable[Batch]) -> Evaluation:
    """Evaluate on all batches. Rows whose leaf `valid` is False, which pad the last batch, are not counted.

    With several processes all of them call it with the same global batches, and get the same result. Each batch is
    averaged on the devices; the averages are weighted by their rows and added on the host.

    Args:
      measure: (params, batch) → (metrics, rows), as in `modes.Program`.
      batches: one pass over the test set.

    Raises:
      ValueError: there was no row to count.
    """
    total, sums = 0, dict[str, float]()
    for metrics, rows in _fetched(measure(params, batch) for batch in batches):
        total += int(rows)
        for name, mean in metrics.items() if rows else ():  # the mean of no row may be NaN
            sums[name] = sums.get(name, 0.0) + float(mean) * int(rows)
    if not total:
        raise ValueError("an evaluation needs at least one row that counts, and the batches had none")
    names = ["loss", *(name for name in sums if name != "loss")]  # jit sorts them
    return Evaluation(total, {name: sums[name] / total for name in names})


def _fetched(results: Iterable[tuple[Metrics, jax.Array]]) -> Iterator[tuple[Metrics, jax.Array]]:
    """The results on the host, each while two more are computed."""
    running: collections.deque[tuple[Metrics, jax.Array]] = collections.deque()
    for result in results:
        running.append(result)
        if len(running) > _IN_FLIGHT:
            yield jax.device_get(running.popleft())
    while running:
        yield jax.device_get(running.popleft())
