"""Measures what each stage costs a training loop, by leaving out one stage after the other while the loop runs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from feedline._src.listen.accounts import Accounts
from feedline._src.listen.words import milliseconds, percent
from feedline._src.loader.form import HostBatch
from feedline._src.order.schedule import Cursor
from feedline._src.placement.place import Placed
from feedline._src.prefetch.pipelines import Closed, Run
from feedline._src.prefetch.watch import Watch
from feedline._src.run import Stages, run_of, run_over

PHASES = ("as it is", "read again", "placed again", "resident")
"""What the loop gets, phase by phase: new rows; the same rows, read and transformed again; one host batch, placed
again and again; one batch that already resides on the devices."""
_MEANING = {
    "fetch": "reading rows that are in no cache yet",
    "preparation": "reading rows from the page cache, and the transform",
    "transfer": "placing batches on the devices",
}


@dataclasses.dataclass
class Diagnosis:
    """What each stage costs, as `Feed.diagnose` measures it.

    The stalls are defined as in DS-Analyzer (Mohan et al., VLDB 2021): each is the time of a step with a stage,
    minus the time of a step without that stage.

    Attributes:
      steps_s: the mean seconds of a step, for each phase of `PHASES` that was measured.
      first_batch_s: seconds from the start of the first phase to its first batch; None: no batch was read.
    """

    steps_s: dict[str, float] = dataclasses.field(default_factory=dict)
    first_batch_s: float | None = None

    @property
    def au(self) -> float | None:
        """Accelerator utilisation: time of a step in the phase "resident" ÷ time of a step in "as it is"."""
        whole_s, resident_s = self.steps_s.get(PHASES[0]), self.steps_s.get(PHASES[-1])
        return None if whole_s is None or resident_s is None else min(1.0, resident_s / whole_s)

    @property
    def stalls_s(self) -> dict[str, float]:
        """The stalls "fetch", "preparation" and "transfer", as far as measured, in seconds per step."""
        found: dict[str, float] = {}
        for number, name in enumerate(_MEANING):
            # of the later phases, the next one does the most work. If noise makes another slower, subtract that
            without_s = max(self.steps_s.get(phase, 0.0) for phase in PHASES[number + 1 :])
            if without_s and PHASES[number] in self.steps_s:
                found[name] = max(0.0, self.steps_s[PHASES[number]] - without_s)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The attributes and properties, as JSON values."""
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
            lines.append(f"  {name:<12} {milliseconds(stall_s):>8} ms  {share:>5}  {_MEANING[name]}")
        if self.first_batch_s is not None:
            lines.append(f"  the first batch came after {self.first_batch_s:.2f} s")
        missing = [phase for phase in PHASES if phase not in self.steps_s]
        if missing:
            lines.append(f"  not measured: {', '.join(missing)}")
        return "\n".join(lines)


_MIN_COUNTED = 4
"""The minimum number of measured steps in a phase."""
_FURTHER_PASSES = 1000
_JOIN_S = 30.0


class DiagnosingPipeline:
    """Delivers batches in the four `PHASES`, and stores the mean time of a step in each phase in `diagnosis`.

    It has the methods of a `Run`: one thread takes batches, and any thread may close it. Each phase that reads
    begins at the feed's cursor. `take` calls `over` after the last phase. ValueError: `steps` is too small.
    """

    waiting = 0

    def __init__(
        self,
        stages: Stages,
        after: Cursor,
        lanes: dict[str, Any] | None,
        accounts: Accounts,
        steps: int,
        diagnosis: Diagnosis,
        over: Callable[[], None] | None = None,
    ) -> None:
        read_ahead = stages.ahead + 1
        least = (read_ahead + _MIN_COUNTED) * len(PHASES)
        if steps < least:
            raise ValueError(
                f"diagnose needs {len(PHASES)} phases of {read_ahead + _MIN_COUNTED} steps, where the first "
                f"{read_ahead} drain the buffers, got steps={steps}; use steps={max(200, least)}"
            )
        self._stages, self._after, self._lanes = stages, after, lanes
        self._place = stages.placer(accounts.placed)
        self._diagnosis, self._over = diagnosis, over
        self._steps = steps // len(PHASES)
        # how many steps at the start of a phase are not measured, because in the first phase they use up the
        # batches that were read ahead while the step compiled
        self._uncounted = max(read_ahead, math.ceil(self._steps / 4))
        self._host: HostBatch | None = None  # the host batch that was read last
        self._run: Run[Placed] | None = None  # the pipeline of the current phase
        self._closed = False
        self._further_passes = 0  # loops begun after the last phase
        self._ending: tuple[str, float] | None = None  # (finished phase, start of its measurement)
        self._batches = self._of_all_phases()

    def start(self) -> None:
        """No-op: the first `take` starts the first phase."""

    def take(self) -> Placed:
        """The next batch. StopIteration after the last phase."""
        if self._closed:
            raise Closed
        placed = next(self._batches, None)
        if placed is None:
            if self._over is not None:
                self._over()
            raise StopIteration(0)  # as in any pipeline: how many rows the end of the pass drops
        # these batches do not count as delivered, so their bad and dropped rows do not count, either
        return placed._replace(metadata=placed.metadata._replace(bad=[], dropped_rows=0))

    def close(self) -> None:
        """End the current phase. Idempotent, from any thread."""
        self._closed = True
        if self._run is not None:
            self._run.close()

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """Wait for the threads of the current phase."""
        return None if self._run is None else self._run.join(timeout_s, reads=reads)

    def finish(self) -> None:
        """If the latest batch was the last of a phase, store the phase's time. Called after the batch's step."""
        if self._ending is not None:
            (phase, since), self._ending = self._ending, None
            _wait_for_devices()
            self._diagnosis.steps_s[phase] = (time.perf_counter() - since) / (self._steps - self._uncounted)

    def forget(self) -> None:
        """Release all batches. Called after `close`, by the thread that took batches."""
        self._batches.close()
        self._host = self._run = None

    def check_further_pass(self) -> None:
        """Count a pass that the loop begins after the last phase. ValueError: more than 1,000."""
        self._further_passes += 1
        if self._further_passes > _FURTHER_PASSES:
            raise ValueError("the diagnosis is over, and gives no further batch; leave the context of diagnose")

    def _of_all_phases(self) -> Generator[Placed]:
        began = time.perf_counter()
        kinds = (self._read(), self._read(), self._placed_again(), self._resident())
        for phase, batches in zip(PHASES, kinds, strict=True):
            since = 0.0
            for number, placed in enumerate(itertools.islice(batches, self._steps)):
                if number == self._uncounted:
                    _wait_for_devices()
                    since = time.perf_counter()
                if self._diagnosis.first_batch_s is None:
                    self._diagnosis.first_batch_s = time.perf_counter() - began
                if number == self._steps - 1:
                    self._ending = phase, since
                yield placed
            self.finish()
            if self._run is not None:
                self._run.close()
                self._run.join(_JOIN_S)

    def _read(self) -> Iterator[Placed]:
        """Batches from the feed's cursor on, pass after pass."""
        after, lanes = self._after, self._lanes
        for number in itertools.count():
            placed = None
            for placed in self._taken_from(run_of(self._stages, after, lanes, self._keep_and_place)):
                yield placed
            if placed is None and number:  # an empty pass. The first pass may be empty, if the feed is at its end
                return
            after, lanes = self._stages.access.next_pass(after), None

    def _keep_and_place(self, host: HostBatch) -> Placed:
        self._host = host
        return self._place(host)

    def _placed_again(self) -> Iterator[Placed]:
        """One host batch, again and again, placed by the same kind of threads as the feed's own batches."""
        if self._host is not None:
            host, watch = self._host, Watch(self._stages.reading)
            repeated = (host for _ in itertools.count())
            yield from self._taken_from(run_over(repeated, self._place, self._stages.settings, watch))

    def _resident(self) -> Iterator[Placed]:
        """Yield one batch that stays on the devices. If a step donates it, yield a new copy."""
        if self._host is None:
            return
        kept = given = self._place(self._host)
        while True:
            if given is kept or any(leaf.is_deleted() for leaf in jax.tree.leaves(given.batch)):
                given = kept._replace(batch=jax.tree.map(jnp.copy, kept.batch))
            yield given

    def _taken_from(self, run: Run[Placed]) -> Iterator[Placed]:
        """Start a pipeline and yield its batches. `close` ends it."""
        self._run = run
        run.start()
        with contextlib.suppress(StopIteration):
            while True:
                yield run.take()


def _wait_for_devices() -> None:
    """Wait for all dispatched computations, since a loop may run ahead of its devices."""
    for array in jax.live_arrays():
        try:
            array.block_until_ready()
        except RuntimeError:
            if not array.is_deleted():  # another thread may just have deleted it
                raise
