"""The training loop and evaluation. Both run at most two batches ahead of the devices."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from feedline._src.agreement.step_places import StepPlaces
from feedline._src.errors import FeedError
from feedline._src.trainer.modes import Program
from feedline._src.trainer.task import Batch, Params, State, all_finite, rows_in

_IN_FLIGHT = 2
"""Maximum steps in flight when the loop asks for the next batch. Two hide dispatch. With many more, the devices
would still have work while the loop waits in `next`, and the wait would not show what input costs. The limit also
bounds the number of batches in use."""
_STEPS_PER_COMPARISON = 100
"""Steps between two comparisons of the processes' positions; a comparison takes the training thread 0.6 ms."""
_MAX_ROWS_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Progress:
    """The steps done so far, and their times. Times begin after the first step of this run, which compiles.

    Attributes:
      step: steps finished, counted over all runs.
      metrics: of the last finished step: "loss" and the other metrics of the loss function. Empty before the
        first step of this run.
      resumed: the part of `step` that earlier runs had done.
      rows: rows trained on in this run.
      elapsed_s: wall time.
      elapsed_rows: rows finished in that time; 0 right after the first step.
      wait_s: the part of the wall time spent in the iterator, waiting for input.

    Example:
      >>> def callback(progress):
      ...     print(f"step {progress.step}: loss {progress.loss:.2f}")
      >>> callback(Progress(10, {"loss": 1.5}, 0, rows=640, elapsed_s=0.5, elapsed_rows=576, wait_s=0.125))
      step 10: loss 1.50
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
        """The loss of the last finished step; NaN before the first step of this run."""
        return self.metrics.get("loss", math.nan)

    @property
    def rows_per_s(self) -> float:
        """Rows per second, over `elapsed_s`; 0 right after the first step."""
        return self.elapsed_rows / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that was spent waiting for input, 0 to 1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


class _Call(NamedTuple):
    """A dispatched call of the program's step.

    Attributes:
      step: number of its last step.
      rows: rows in its batches.
      place: epoch and position of its first row; None if the batches do not come from a feed.
    """

    step: int
    rows: int
    metrics: jax.Array
    place: tuple[int, int] | None


class Loop:
    """Runs a program's step on batches, and counts steps, rows and times.

    At most two calls of the step are in flight while the host asks for a batch. The metrics of `report_every`
    steps stay on the devices and are fetched together, after these steps are done; no other data moves between
    host and devices. After each fetch, the loop checks that every loss is finite. It calls `report` after the
    first step, at every multiple of `report_every` steps, and at the end.

    Args:
      done: number of steps that earlier runs did.
      feed: the feed that the batches come from. All processes end if their feeds are at different positions at the
        same step. If a loss is not finite, the error names the rows.

    Attributes:
      dispatched: steps dispatched, counted over all runs. `progress` counts only finished steps.
    """

    def __init__(
        self,
        program: Program,
        done: int,
        report: Callable[[Progress], None] | None = None,
        report_every: int = 10,
        guard_transfers: bool = True,
        feed: Any = None,
    ) -> None:
        self.progress = Progress(done, {}, done, 0, 0.0, 0, 0.0)
        self.dispatched = self._compared = done
        self._program = program
        self._report = report
        self._report_every = report_every
        self._guard_transfers = guard_transfers
        self._feed = feed if hasattr(feed, "rows_of") else None
        self._in_flight = collections.deque[_Call]()
        self._unreported: list[_Call] = []  # finished calls
        self._last: _Call | None = None  # the last finished call
        self._started_s = 0.0  # when the first step had finished
        if self._feed is not None:
            processes = {device.process_index for device in program.mesh.devices.flat}
            self._step_places = StepPlaces("fit", processes)
            self._step_places.compare(done, self._feed.epoch, self._feed.position)

    def steps(self, state: State, batches: Iterable[Batch]) -> Iterator[State]:
        """Yield each state before asking for the next batch. The next step donates the state. Call `end` last."""
        batches, per_call = iter(batches), self._program.steps_per_call
        guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # tracing may transfer
        while True:
            place = None if self._feed is None else (self._feed.epoch, self._feed.position)
            asked_s = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            if self.progress.rows:
                self._count(wait_s=self.progress.wait_s + time.perf_counter() - asked_s)
            with guard:
                state, metrics = self._program.step(state, batch)
            self.dispatched += per_call
            self._in_flight.append(_Call(self.dispatched, rows_in(batch, per_call), metrics, place))
            yield state
            self._wait(_IN_FLIGHT if self.progress.rows else 0)
            if self._guard_transfers:
                guard = jax.transfer_guard("disallow")

    def check(self, params: Params) -> None:
        """Make sure that the parameters after the last dispatched step may be saved. Waits for all steps.

        Raises:
          FeedError: a loss since the last report, or a parameter, is not finite.
          ProcessError: the feed of another process is at another position.
        """
        self._compare_places(self._in_flight[-1] if self._in_flight else self._last)
        self._wait(0)
        self._fetched()
        if not all_finite(params):
            step = self.progress.step
            raise self._error(step, f"the loss of step {step:,} is finite, but the parameters after it are not")

    def end(self) -> Progress:
        """Wait for all steps, and report the last one."""
        self._wait(0)
        if not self.progress.step:
            raise ValueError(
                "training needs at least one batch, and the iterator gave none; check its rows and remainder"
            )
        if self._unreported:
            self._make_report()
        return self.progress

    def _wait(self, in_flight: int) -> None:
        """Wait until at most `in_flight` calls run. Count the finished calls, and report if a report is due."""
        while len(self._in_flight) > in_flight:
            self._last = call = self._in_flight.popleft()
            call.metrics.block_until_ready()
            self._unreported.append(call)
            now_s, before = time.perf_counter(), self.progress
            if not before.rows:
                self._started_s = now_s
            self._count(
                step=call.step,
                rows=before.rows + call.rows,
                elapsed_s=now_s - self._started_s,
                elapsed_rows=before.elapsed_rows + (call.rows if before.rows else 0),
            )
            if not before.rows or crosses(before.step, call.step, self._report_every):
                self._make_report()

    def _count(self, **counted: Any) -> None:
        self.progress = dataclasses.replace(self.progress, **counted)

    def _make_report(self) -> None:
        last = self._fetched()[-1]
        self._unreported.clear()
        self._count(metrics=dict(zip(self._program.metrics, last, strict=True)))
        self._compare_places(self._last, _STEPS_PER_COMPARISON)
        if self._report is not None:
            self._report(self.progress)

    def _fetched(self) -> list[list[float]]:
        """The metrics of each step since the last report. FeedError names the first loss that is not finite."""
        calls = jax.device_get([call.metrics for call in self._unreported])
        steps = [step for call in calls for step in call.reshape(-1, call.shape[-1]).tolist()]
        for step, (loss, *_) in enumerate(steps, self.progress.step + 1 - len(steps)):
            if not math.isfinite(loss):
                raise self._error(step, f"the loss is {loss} at step {step:,}, the first that is not finite")
        del self._unreported[:-1]  # the next report shows only the last call
        return steps

    def _compare_places(self, call: _Call | None, every: int = 1) -> None:
        """Compare the epoch and position of `call` with those of other processes, once in `every` steps."""
        if call is not None and call.place is not None and crosses(self._compared, call.step, every):
            self._compared = call.step
            self._step_places.compare(call.step, *call.place)

    def _error(self, step: int, message: str) -> FeedError:
        """The error that ends training because of an unreported step. Names the step's rows, if known."""
        calls = [*self._unreported, self._last]
        call = next(call for call in calls if call is not None and call.step >= step)
        rows, (epoch, position) = "the rows", call.place or (None, None)
        if self._feed is not None:
            per_call = self._program.steps_per_call
            state = {**self._feed.get_state(), "epoch": epoch, "position": position}
            # the number of batches before this call, by which `rows_of` looks up the batch size
            state["step"] -= self.dispatched - call.step + per_call
            with contextlib.suppress(TypeError, ValueError):  # a stream has no row indices
                found = self._feed.rows_of(state)
                of_step = found.reshape(per_call, -1)[step - call.step - 1].tolist()
                more = f", … ({len(of_step)})" if len(of_step) > _MAX_ROWS_SHOWN else ""
                rows = f"the training rows {', '.join(map(str, of_step[:_MAX_ROWS_SHOWN]))}{more}"
        return FeedError(
            f"training ends: {message}; later steps cannot repair the parameters. Look for extreme values "
            f"in {rows} of that step and in the rows of the step before. Look in the loss for a division by 0 or "
            "a logarithm of 0, or lower the learning rate",
            stage="train",
            epoch=epoch,
            position=position,
        )


def train(program: Program, state: State, batches: Iterable[Batch], **options: Any) -> tuple[State, Progress]:
    """Run the step on all batches of a finite iterable. `options` are passed to `Loop`."""
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
      metrics: "loss" and the other metrics of the loss function, as means over these rows.
    """

    rows: int
    metrics: Mapping[str, float]


def evaluate(program: Program, params: Params, batches: Iterable[Batch]) -> Evaluation:
    """Evaluate on all batches. Rows whose leaf `valid` is False are not counted: they pad the last batch.

    The devices average over each batch. The host averages over the batches, weighted by their valid rows.
    """
    total, sums = 0, [0.0] * len(program.metrics)
    for means, rows in _fetched(program.measure(params, batch) for batch in batches):
        if rows:  # without valid rows the means may be NaN
            total += int(rows)
            sums = [summed + int(rows) * mean for summed, mean in zip(sums, means.tolist(), strict=True)]
    if not total:
        raise ValueError("an evaluation needs at least one row that counts, and the batches had none")
    return Evaluation(total, {name: summed / total for name, summed in zip(program.metrics, sums, strict=True)})


def _fetched(results: Iterable[Any]) -> Iterator[Any]:
    """Yields results on the host. While it fetches one, the devices compute two more."""
    in_flight = collections.deque[Any]()
    for result in results:
        in_flight.append(result)
        if len(in_flight) > _IN_FLIGHT:
            yield jax.device_get(in_flight.popleft())
    yield from map(jax.device_get, in_flight)
