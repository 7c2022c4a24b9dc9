"""A pipeline that leaves out one stage after the other while a training loop takes batches from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from feedline._src.listen.diagnosis import PHASES, Diagnosis
from feedline._src.loader.host_batch import HostBatch
from feedline._src.order.schedule import Cursor
from feedline._src.prefetch.handover import Closed
from feedline._src.prefetch.watch import Watch
from feedline._src.record import Listener
from feedline._src.run import Placed, Placer, Run, Stages, run_of

_COUNTED = 4
"""Steps of a phase that count, at the least."""
_FURTHER_PASSES = 1000
_JOIN_S = 30.0


class DiagnosingPipeline:
    """Gives so many batches in four phases, `PHASES`, and writes the times of their steps into `diagnosis`.

    It has the methods of a pipeline: one thread takes, the owner closes it from any thread.

    Args:
      stages: of the feed.
      after, lanes: where the feed is. Each phase that reads begins there.
      listener: told of the batches that are placed.
      steps: of all phases together.
      diagnosis: gets the times.
      over: called by `take` once the last phase is over; None: nothing is.

    Raises:
      ValueError: too few steps.
    """

    waiting = 0

    def __init__(
        self,
        stages: Stages,
        after: Cursor,
        lanes: dict[str, Any] | None,
        listener: Listener,
        steps: int,
        diagnosis: Diagnosis,
        over: Callable[[], None] | None = None,
    ) -> None:
        uncounted = stages.ahead + 1
        least = (uncounted + _COUNTED) * len(PHASES)
        if steps < least:
            raise ValueError(
                f"diagnose needs {len(PHASES)} phases of {uncounted + _COUNTED} steps, of which {uncounted} drain "
                f"the buffers, got steps={steps}; use {max(200, least)}"
            )
        self._stages = stages
        self._begin = after, lanes
        self._place = Placer(stages, listener)
        self._diagnosis = diagnosis
        self._over = over
        self._steps = steps // len(PHASES)
        # meanwhile buffers drain, which in the first phase were filled while the step compiled
        self._uncounted = max(uncounted, math.ceil(self._steps / 4))
        self._host: HostBatch | None = None  # the latest one of the first phase
        self._inner: Run[Placed] | None = None
        self._closed = False
        self._phase = PHASES[0]
        self._further = 0  # loops begun after the last phase
        self._given = 0  # batches of the phase
        self._since: float | None = None  # when those began that count
        self._all = self._phases()

    def start(self) -> None:
        """The first `take` starts the first phase."""

    def take(self) -> Placed:
        """The next batch. StopIteration after the last phase."""
        try:
            if self._closed:
                raise Closed
            placed = next(self._all)
        except StopIteration:
            if self._over is not None:
                self._over()
            raise StopIteration(0) from None  # as a pipeline says how many rows its end leaves out
        # bad rows were counted, and are not delivered
        return placed._replace(metadata=placed.metadata._replace(bad=[], dropped_rows=0))

    def close(self) -> None:
        """End the phase. Idempotent, from any thread."""
        self._closed = True
        if self._inner is not None:
            self._inner.close()

    def finish(self) -> None:
        """The loop is done with the batch that it took last. If that was the last of a phase, note the phase."""
        if self._given == self._steps and self._since is not None:
            _wait_for_devices()
            counted = self._steps - self._uncounted
            self._diagnosis.add(self._phase, (time.perf_counter() - self._since) / counted, counted)
            self._since = None

    def forget(self) -> None:
        """Let go of all batches. After `close`, by the thread that took."""
        self._all.close()
        self._host = self._inner = None

    def check_further_pass(self) -> None:
        """The loop asks for another pass after the last phase. ValueError if it does so for ever."""
        self._further += 1
        if self._further > _FURTHER_PASSES:
            raise ValueError("the diagnosis is over, and gives no further batch; leave the context of diagnose")

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """Wait for the threads of the phase."""
        return None if self._inner is None else self._inner.join(timeout_s, reads=reads)

    def _phases(self) -> Generator[Placed]:
        began = time.perf_counter()
        for phase, batches in zip(
            PHASES,
            (self._read(self._keep), self._read(self._place), self._placed_again(), self._resident()),
            strict=True,
        ):
            self._phase, self._given = phase, 0
            for number in range(self._steps):
                if number == self._uncounted:
                    _wait_for_devices()
                    self._since = time.perf_counter()
                placed = next(batches, None)
                if placed is None:
                    break
                if self._diagnosis.first_batch_s is None:
                    self._diagnosis.first_batch_s = time.perf_counter() - began
                self._given += 1
                yield placed
            self.finish()
            if self._inner is not None:
                self._inner.close()
                self._inner.join(_JOIN_S)

    def _keep(self, host: HostBatch) -> Placed:
        self._host = host
        return self._place(host)

    def _read(self, place: Callable[[HostBatch], Placed]) -> Iterator[Placed]:
        """Batches from the feed's place on, pass after pass."""
        after, lanes = self._begin
        while True:
            pipeline = self._inner = run_of(self._stages, after, lanes, place=place)
            pipeline.start()
            got = False
            while True:
                try:
                    placed = pipeline.take()
                except StopIteration:
                    break
                got = True
                yield placed
            if not got and after != self._begin[0]:
                return
            after, lanes = self._stages.access.next_pass(after), None

    def _placed_again(self) -> Iterator[Placed]:
        """One host batch again and again, placed by threads like the feed's own batches."""
        host = self._host
        if host is not None:
            watch = Watch(self._stages.reading)
            pipeline = self._inner = Run(_Same(host), self._place, self._stages.settings, watch)
            pipeline.start()
            while True:
                yield pipeline.take()

    def _resident(self) -> Iterator[Placed]:
        """One batch on the devices again and again; copies made there if the step donates its batch."""
        host = self._host
        if host is None:
            return
        kept = self._place(host)
        given = kept
        while True:
            if given is kept or any(leaf.is_deleted() for leaf in jax.tree.leaves(given.batch)):
                given = kept._replace(batch=jax.tree.map(jnp.copy, kept.batch))
            yield given


def _wait_for_devices() -> None:
    """Until all that the loop has dispatched is done: a loop that never waits for its steps runs ahead of them."""
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


class _Same:
    """An iterator that gives one host batch again and again."""

    def __init__(self, host: HostBatch) -> None:
        self._host = host

    def __next__(self) -> HostBatch:
        return self._host

    def close(self) -> None:
        """Nothing to close."""
