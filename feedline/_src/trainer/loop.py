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
from feedline._src.trainer.task import Batch, Metrics, Params, State, all_finite, rows_in

_IN_FLIGHT = 2
"""Steps that may run while the next batch is asked for: enough to hide dispatch, but few, so that time in `next`
is time waiting for input, and the number of batches in use is bounded."""


class NotFinite(FeedError):
    """A loss, or a parameter, is not finite. Later steps cannot repair the parameters.

    Attributes:
      step: the first step whose loss is not finite, counted over all runs from 1.
    """

    def __init__(self, step: int, found: str) -> None:
        self.step = step
        super().__init__(found, stage="train")


@dataclasses.dataclass(frozen=True)
class Progress:
    """The steps done so far, and their times. These begin after the first step of this run, which compiles.

    Attributes:
      step: steps finished, counted over all runs.
      metrics: of the last finished step: "loss", and what the loss function measures besides. Empty before the
        first step of this run.
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


class Loop:
    """Runs a program's step on batches, and counts steps, rows and times.

    At most two calls of the step are in flight while the host asks for a batch. The metrics of `report_every`
    steps stay on the devices and are fetched together, after these steps are done; no other data moves between
    host and devices. Each fetch checks that every loss is finite, and then calls `report`: after the first step,
    at every multiple of `report_every` steps, and at the end.
    """

    def __init__(
        self,
        program: Program,
        resumed: int,
        report: Callable[[Progress], None] | None = None,
        report_every: int = 10,
        guard_transfers: bool = True,
    ) -> None:
        self.progress = Progress(resumed, {}, resumed, 0, 0.0, 0, 0.0)  # of the finished steps
        self._program = program
        self._report = report
        self._report_every = report_every
        self._guard_transfers = guard_transfers
        self._in_flight: collections.deque[tuple[jax.Array, int]] = collections.deque()  # (metrics, rows)
        self._unreported: list[jax.Array] = []  # metrics of finished calls
        self._started_s = 0.0  # when the first step had finished

    def steps(self, state: State, batches: Iterable[Batch]) -> Iterator[State]:
        """Each new state, before the next batch is asked for; the next step donates it. Call `end` afterwards."""
        guard: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext()
        )  # none at first: tracing may transfer
        for batch in self._timed(iter(batches)):
            rows = rows_in(batch, self._program.steps_per_call)
            with guard:
                state, metrics = self._program.step(state, batch)
            self._in_flight.append((metrics, rows))
            yield state
            self._wait(_IN_FLIGHT if self.progress.rows else 0)
            if self._guard_transfers:
                guard = jax.transfer_guard("disallow")

    def check(self, params: Params) -> None:
        """Wait for all steps. Raises `NotFinite` for a loss since the last report, or a parameter, that is not."""
        self._wait(0)
        self._fetched()
        if not all_finite(params):
            step = self.progress.step
            raise NotFinite(step, f"the parameters are not finite after step {step:,}, though its loss is")

    def end(self) -> Progress:
        """Wait for all steps, and report the last one."""
        self._wait(0)
        if not self.progress.step:
            raise ValueError(
                "training needs at least one batch, and the iterator gave none; see its rows and remainder"
            )
        if self._unreported:
            self._make_report()
        return self.progress

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
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

    def _wait(self, in_flight: int) -> None:
        """Wait until at most `in_flight` calls run. Count the finished ones, and report if that is due."""
        while len(self._in_flight) > in_flight:
            metrics, rows = self._in_flight.popleft()
            self._unreported.append(metrics.block_until_ready())
            now_s, before = time.perf_counter(), self.progress
            self._set(step=before.step + self._program.steps_per_call, rows=before.rows + rows)
            if before.rows:
                self._set(elapsed_s=now_s - self._started_s, elapsed_rows=before.elapsed_rows + rows)
            else:
                self._started_s = now_s
            if not before.rows or crosses(before.step, self.progress.step, self._report_every):
                self._make_report()

    def _make_report(self) -> None:
        last = self._fetched()[-1]
        self._unreported.clear()
        self._set(metrics=dict(zip(self._program.metrics, last, strict=True)))
        if self._report is not None:
            self._report(self.progress)

    def _fetched(self) -> list[list[float]]:
        """The metrics of each step since the last report. Raises `NotFinite` for the first such loss."""
        calls = jax.device_get(self._unreported)
        steps = [step for call in calls for step in call.reshape(-1, call.shape[-1]).tolist()]
        first = self.progress.step + 1 - len(steps)
        for step, (loss, *_) in enumerate(steps, first):
            if not math.isfinite(loss):
                raise NotFinite(step, f"the loss is {loss} at step {step:,}, the first that is not finite")
        return steps

    def _set(self, **counted: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **counted)


def train(program: Program, state: State, batches: Iterable[Batch], **options: Any) -> tuple[State, Progress]:
    """Run the step on all batches of a finite iterable. `options` are those of `Loop`."""
    loop = Loop(program, int(jax.device_get(state.step)), **options)
    for after in loop.steps(state, batches):
        state = after
    return state, loop.end()


def crosses(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]."""
    return before // every != after // every


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

    Each batch is averaged on the devices; the averages are weighted by their rows and added on the host. While the
    results of a batch are fetched, two more are computed.
    """
    total, sums = 0, collections.defaultdict[str, float](float)
    in_flight: collections.deque[tuple[Metrics, jax.Array]] = collections.deque()

    def fetched() -> Iterator[tuple[Metrics, jax.Array]]:
        for batch in batches:
            in_flight.append(measure(params, batch))
            if len(in_flight) > _IN_FLIGHT:
                yield jax.device_get(in_flight.popleft())
        yield from map(jax.device_get, in_flight)

    for metrics, rows in fetched():
        total += int(rows)
        for name, mean in metrics.items() if rows else ():  # the mean of no row may be NaN
            sums[name] += float(mean) * int(rows)
    if not total:
        raise ValueError("an evaluation needs at least one row that counts, and the batches had none")
    names = ["loss", *(name for name in sums if name != "loss")]  # jit sorts them
    return Evaluation(total, {name: sums[name] / total for name in names})
