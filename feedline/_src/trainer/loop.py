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
        super().__init__(f"the loss is {loss} at step {step:,}, the first that is no finite number", stage="train")


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
    after_step: Callable[[State, jax.Array], bool | None] | None = None,
) -> tuple[State, Progress]:
    """Run the step on every batch. Returns the last state and the progress.

    At most two calls of the step run while the host asks for a batch. The metrics of the last `report_every` steps
    stay on the devices in one small array. It is fetched once in `report_every` steps, after its step is done; no
    other data moves between host and devices. Each fetch checks that every loss is finite.

    Args:
      batches: a finite iterable; cut an endless one with `itertools.islice`.
      report: called after the first step, at every multiple of `report_every` steps, and at the end, in this
        thread.
      guard_transfers: make it an error if a step moves an array between host and devices, except the first, whose
        tracing may move constants.
      after_step: called with each new state and the array of recent metrics, before the next batch is asked for,
        so that iterator and state are at the same step. The next step donates the state. If the result is true, no
        other batch is asked for.

    Raises:
      ValueError: there was no batch, and no step was done before.
      NotFinite: a loss is not finite.
    """
    meter = _Meter(program, iter(batches), int(jax.device_get(state.step)), report_every)
    recent = program.recent(report_every + program.steps_per_call - 1)
    running: collections.deque[tuple[jax.Array, int]] = collections.deque()
    guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # tracing may transfer constants

    def finish_to(ahead: int) -> None:
        while len(running) > ahead:
            meter.finish(*running.popleft())
            if meter.fetched and report:
                report(meter.progress())

    for batch in meter:
        rows = rows_in(batch, program.steps_per_call)
        with guard:
            state, recent = program.step(state, recent, batch)
        running.append((recent, rows))
        ended = after_step(state, recent) if after_step else False
        finish_to(_IN_FLIGHT if meter.steps else 0)
        if guard_transfers:
            guard = jax.transfer_guard("disallow")
        if ended:
            break
    finish_to(0)
    if not meter.steps and not meter.resumed:
        raise ValueError(
            "training needs at least one batch, and the iterator gave none; see its rows and remainder"
        )
    if not meter.fetched:
        meter.fetch()
        if report:
            report(meter.progress())
    return state, meter.progress()


def crosses(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after].

    Example:
      >>> crosses(8, 10, 10), crosses(10, 12, 10)
      (True, False)
    """
    return before // every != after // every


class _Meter:
    """Passes the batches on, and counts their steps, rows and times."""

    def __init__(self, program: Program, batches: Iterator[Batch], resumed: int, report_every: int) -> None:
        self._names = program.metrics
        self._steps_per_call = program.steps_per_call
        self._report_every = report_every
        self._batches = batches
        self.resumed = resumed
        self.steps = 0
        self._checked_steps = 0  # whose losses were fetched
        self._recent: jax.Array | None = None  # as it was after the last finished step
        self._metrics: dict[str, float] = {}  # of the last step fetched
        self._rows = 0
        self._first_rows = 0
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

    @property
    def fetched(self) -> bool:
        """Whether the metrics of the last finished step are on the host."""
        return self._checked_steps == self.steps

    def finish(self, recent: jax.Array, rows: int) -> None:
        """Wait until a call of the step is done, count it, and fetch its metrics if it is time."""
        self._recent = recent.block_until_ready()
        self._finished_s = time.perf_counter()
        first, before = not self.steps, self.resumed + self.steps
        self.steps += self._steps_per_call
        self._rows += rows
        if first:
            self._first_rows, self._started_s = rows, self._finished_s
        if first or crosses(before, self.resumed + self.steps, self._report_every):
            self.fetch()

    def fetch(self) -> None:
        """Fetch the metrics of the steps since the last fetch. Raises `NotFinite` for the first such loss."""
        assert self._recent is not None
        rows = jax.device_get(self._recent).tolist()
        for step in range(self.resumed + self._checked_steps + 1, self.resumed + self.steps + 1):
            metrics = dict(zip(self._names, rows[(step - 1) % len(rows)], strict=True))
            if not math.isfinite(metrics["loss"]):
                raise NotFinite(step, metrics["loss"])
        self._metrics, self._checked_steps = metrics, self.steps

    def progress(self) -> Progress:
        """The progress, with the metrics of the last step fetched."""
        return Progress(
            step=self.resumed + self.steps,
            metrics=self._metrics,
            resumed=self.resumed,
            rows=self._rows,
            elapsed_s=self._finished_s - self._started_s,
            elapsed_rows=self._rows - self._first_rows,
            wait_s=self._wait_s,
        )


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
    running: collections.deque[tuple[Metrics, jax.Array]] = collections.deque()

    def add(all_but: int) -> None:
        nonlocal total
        while len(running) > all_but:
            metrics, rows = jax.device_get(running.popleft())
            total += int(rows)
            for name, mean in metrics.items():
                if rows:  # the mean of no row may be NaN
                    sums[name] = sums.get(name, 0.0) + float(mean) * int(rows)

    for batch in batches:
        running.append(measure(params, batch))
        add(all_but=_IN_FLIGHT)
    add(all_but=0)
    if not total:
        raise ValueError("an evaluation needs at least one row that counts, and the batches had none")
    names = ["loss", *(name for name in sums if name != "loss")]  # jit sorts them
    return Evaluation(total, {name: sums[name] / total for name in names})
