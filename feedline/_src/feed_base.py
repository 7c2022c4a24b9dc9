"""`Feed` except iteration: its state, seeking, its properties, and the pipelines that read ahead."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline._src import state as states
from feedline._src.agreement.in_step import Place
from feedline._src.agreement.monitor import out_of_step
from feedline._src.build import build, moved, reweighted
from feedline._src.feed_options import FeedOptions, asked_hooks, changed
from feedline._src.listen.listening import FeedListener
from feedline._src.listen.statistics import Statistics
from feedline._src.listen.tokens import TokenCounts
from feedline._src.options import MAX_COUNT, Reading, Settings, checked_integer
from feedline._src.order.schedule import ENDLESS, Cursor, Remainder
from feedline._src.placement.place import Placed
from feedline._src.prefetch.pipelines import INSIDE, Run
from feedline._src.record import Counters
from feedline._src.run import Runs, Sizes, Stages, run_of
from feedline._src.runtime.threads import ProcessBound, SingleThread

if TYPE_CHECKING:
    from feedline._src.listen.diagnosis import DiagnosingPipeline, Diagnosis
    from feedline._src.listen.report import Report

GRACE_S = 1.0
"""Seconds to wait for the threads of a closed pipeline before the feed continues without them."""
CLOSED = "the feed is closed; to continue, build a new feed and call its set_state with this feed's get_state()"
_MAX_LEAVES_SHOWN = 12


class Delivered(NamedTuple):
    """The number of batches delivered over all resumes; the cursor and the lanes' states after the last batch."""

    step: int
    cursor: Cursor
    lanes: dict[str, Any] | None


class FeedBase(ProcessBound):
    """A feed's stages, its position, and the pipeline (`_run`) that reads ahead of the position.

    `_sizes` and `_delivered` determine the next batch. A method that changes one of them ends the pipeline, and
    the next pipeline starts at `_delivered`. Methods that change nothing work on any thread, and after `close`.
    """

    def _build(self, options: FeedOptions) -> None:
        super().__init__()
        self._options = changed(options)
        if not isinstance(self._options, FeedOptions):
            raise TypeError(f"a feed is built from a feedline.FeedOptions, got {self._options!r}")
        self._asked = asked_hooks()
        self._sizes = build(self._options)  # the stages for each batch size
        self._running = self._sizes.first  # the stages of the pipeline in use, or of the latest one
        self._delivered = Delivered(0, Cursor(0, 0), None)  # replaced as a whole, with each delivery
        self._exhausted = False  # the pass is over; `iter` begins the next pass
        self._closed = False
        self._releases = iter([True])  # the thread that takes True closes the source
        self._loop_began: int | None = None  # the step at which `iter` began to loop over this pass
        self._single_thread = SingleThread()  # for `next`, `seek`, `set_state` and the like
        # the pipeline that reads ahead; None: none was started, or `next` is taking a batch from it now
        self._run: Run[Placed] | None = None
        self._counted = Counters()
        self._listener = FeedListener(self._running)
        self._token_counts = TokenCounts()
        self._diagnosed: DiagnosingPipeline | None = None  # while a context of `diagnose` is open
        self._moved_from: Place | None = None  # the place before `seek` or `set_state`, until a pipeline starts
        self._runs = Runs()
        weakref.finalize(self, self._runs.close).atexit = False

    @property
    def _stages(self) -> Stages:
        """The stages of the next batch."""
        return self._sizes.at(self._delivered.step)

    @property
    def options(self) -> FeedOptions:
        """All arguments of the feed, as one value."""
        return self._options

    @property
    def batch_size(self) -> int:
        """Rows in the next global batch."""
        return self._stages.plan.batch_size

    @property
    def order(self) -> Any:
        """The order of rows. `Order(shuffle=False)`: the source's own, as with Grain datasets. None: a stream."""
        return self._stages.access.shown_order

    @property
    def epochs(self) -> int | None:
        """The number of epochs in a pass; None: endless."""
        return self._options.epochs

    @property
    def remainder(self) -> Remainder:
        """What happens to rows that do not fill a batch: "drop", "pad" or "wrap"."""
        return self._options.remainder

    @property
    def reading(self) -> Reading:
        """The reading options, with the `threads`, `workers` and `buffer` in use now."""
        threads, workers, buffer, _ = self._stages.settings
        return dataclasses.replace(self._stages.reading, threads=threads, workers=workers, buffer=buffer)

    @property
    def prefetch(self) -> int:
        """The number of placed batches that may wait now; 0: synchronous."""
        return self._stages.settings.prefetch

    @property
    def steps_per_call(self) -> int:
        """Batches that one `next` returns."""
        return self._options.steps_per_call

    def __len__(self) -> int:
        """Deliveries in a pass: batches ÷ `steps_per_call`.

        Raises TypeError if the feed is endless or reads a stream, or if the batch size changes.
        """
        length = None if self._sizes.changes else self._stages.plan.length
        if length is None:
            raise TypeError(
                "len needs passes of known length, but this feed reads a stream, is endless, or changes "
                "its batch size; bound the loop with zip(range(n), feed)"
            )
        return length

    def __bool__(self) -> bool:
        """True, so that Python does not ask for `len`, which an endless feed lacks."""
        return True

    @property
    def spec(self) -> Any:
        """The next batch as `jax.ShapeDtypeStruct`s with shardings, to compile a step before the first batch."""
        return self._stages.placement.spec

    @property
    def epoch(self) -> int:
        """Epoch of the next batch; if the pass is exhausted, of the last batch."""
        return self._stages.access.next_cursor(self._delivered.cursor).epoch

    @property
    def position(self) -> int:
        """Position of the next batch's first row in its epoch."""
        return self._stages.access.next_cursor(self._delivered.cursor).position

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, for remainder "drop" and "pad". Raises TypeError for "wrap" and for streams.

        If the batch size changes, it is computed with the size of the next batch.
        """
        return self._stages.access.steps_per_epoch()

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values: the place after the last batch *delivered*.

        The state is the same on every process, except for a stream with several lanes: there it contains only the
        lanes that this process reads, and `feedline.save_lanes` saves all lanes. With random access, the
        state is a few integers and the spec of a row: under 1 KB for up to some twenty leaves.
        """
        (step, cursor, lanes), stages = self._delivered, self._stages
        lanes = lanes or dict.fromkeys(map(str, stages.access.form.part.lanes))  # None: no lane has begun
        writers = [processes[0] for processes in stages.plan.lane_owners]
        return states.make(step, cursor, stages.fingerprint, lanes, writers)

    def rows_of(self, state: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        """Return the row indices of the batch that follows `state`. Reads no data.

        If `state` is at the end of a pass, that is the first batch of the next pass.

        Returns:
          int64[batch_size]: row indices in the source, in the order of the global batch; -1 for
          padding. With several steps per call, int64[steps_per_call, batch_size].
        """
        sizes, step, cursor = self._after(state, ())
        return sizes.at(step).access.rows_of(cursor)

    def set_state(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Continue from a state: the next batch begins with the first undelivered row.

        Topology, mesh, batch size, number of epochs, remainder, threads and workers may have changed. With random
        access, the state's position must be at most the number of rows (the end of the epoch).

        Args:
          state: what `get_state` returned, perhaps after a round trip through JSON.
          allow: fields of the state's fingerprint that may differ: "rows", "spec", "data", "order", "format".

        Raises:
          ValueError: the state was saved with other data (the message names the field), lies beyond the data,
            or contradicts itself.
        """
        sizes, step, cursor = self._after(state, allow)
        plan = self._stages.plan
        lanes = states.check_lanes(state, plan.lanes, [str(lane) for lane in plan.reads[0].lanes])
        self._go_to(Delivered(step, cursor, lanes), sizes)

    def _after(self, state: Mapping[str, Any], allow: Collection[str]) -> tuple[Sizes, int, Cursor]:
        """Validate a state. Returns the stages with the state's weights of a mixture, the step, and the cursor."""
        order, position = states.order_and_position(state)
        sizes = self._sizes.map(
            lambda stages: stages.reweighted(stages.access.source.with_weights_of(order, position))
        )
        return sizes, *states.check(state, sizes.at(self._delivered.step).fingerprint, allow)

    def seek(self, epoch: int, position: int = 0) -> None:
        """Go to a place in the data. The next batch begins there or, if no batch is left, at the next epoch.

        The state's `step` does not change.

        Args:
          epoch: at least 0.
          position: in the epoch's order, at most the number of rows (the end of the epoch). Streams have no random
            access, so they allow only 0.

        Raises:
          ValueError: there is no such place; the message names the largest position.
        """
        epoch = checked_integer("epoch", epoch, at_least=0)
        position = checked_integer("position", position, at_least=0)
        if max(epoch, position) >= 1 << 63:
            raise ValueError(
                f"seek takes an epoch and a position below 2^63, got epoch {epoch}, position {position}"
            )
        states.check_position(position, self._stages.fingerprint["rows"])
        self._go_to(Delivered(self._delivered.step, Cursor(epoch, position), None), self._sizes)

    def start(self) -> None:
        """Begin to read ahead, so that the first `next` waits less.

        Call it after `set_state` and before the model is restored or compiled. Without it, reading begins in the
        first `next`. It is a no-op if the feed reads ahead already, and at the end of a pass.

        Raises:
          ValueError: the feed is closed.
          ProcessError: another process went to a different place by `seek` or `set_state`.
        """
        with self._single_thread:
            self._check_open()
            if self._run is None and not self._exhausted:
                self._run = self._start()

    def move(self, sharding: Any) -> None:
        """Continue with the same rows on another mesh of the same processes, such as six of eight devices.

        The next batch begins with the first row that was not delivered. With several processes, all of them must
        call it after the same batch. The batch size must suit the new mesh. Batches that were placed ahead are
        dropped, and their rows are read again.

        Args:
          sharding: as in `Feed`.

        Raises:
          ValueError, TypeError: the sharding does not suit the batch, or its devices belong to other processes.
            The feed continues where it was.
          ProcessError: processes call it with different meshes, or after different batches.

        Example:
          >>> import jax, numpy as np
          >>> from feedline import Feed, Order
          >>> feed = Feed(np.arange(48), 12, jax.devices()[0], order=Order(shuffle=False))
          >>> first = next(feed)
          >>> feed.move(jax.devices()[-1])
          >>> second = next(feed)
          >>> second.tolist()[0], second.devices() == {jax.devices()[-1]}
          (12, True)
          >>> feed.close()
        """
        with self._single_thread:
            self._check_not_diagnosed("stays on its mesh")
            options, sizes = moved(self._sizes, self._options, sharding, self._place())
            if (bounds := sizes.first.bounds) is not None:
                settings = bounds.within(self._stages.settings)
                if bounds.allow(settings):
                    sizes = sizes.map(lambda stages: stages.tuned(settings))
            self._stop(GRACE_S, reads=False)
            self._sizes, self._options = sizes, options

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of a `feedline.Mixture` from the next batch on.

        The weights are part of the state, so a restored feed continues with them. Phases of the mixture that
        begin later keep their own weights. With several processes, all of them must call it after the same
        batch. Batches that were placed ahead are dropped, and other rows are read.

        Args:
          weights: {name of a source: weight}, with any sum.

        Raises:
          TypeError, ValueError: the source is not an endless mixture, or the weights do not suit it. The feed
            continues as it was.
          ProcessError: processes call it with different weights, or after different batches.

        Example:
          >>> import jax, numpy as np
          >>> from feedline import Feed, Mixture
          >>> mixture = Mixture({"a": {"x": np.zeros(9)}, "b": {"x": np.ones(9)}}, weights={"a": 1, "b": 1})
          >>> feed = Feed(mixture, 8, jax.devices()[0])
          >>> int(next(feed)["source"].sum())
          4
          >>> feed.set_weights({"a": 1, "b": 3})
          >>> int(next(feed)["source"].sum())
          6
          >>> feed.close()
        """
        with self._single_thread:
            self._check_not_diagnosed("keeps its weights")
            sizes = reweighted(self._sizes, self._options, weights, self._place())
            self._stop(GRACE_S, reads=False)
            self._sizes = sizes

    def statistics(self) -> Statistics:
        """Return an immutable snapshot of the feed's counts and times so far."""
        ready = self._runs.waiting
        statistics = self._listener.statistics(self._counted, ready)
        access = self._stages.access
        taken = access.order.taken_before(*self._delivered.cursor)
        return dataclasses.replace(
            statistics,
            source_epochs={each.name: each.rows / each.order.rows for each in taken if each.name} or None,
            tokens=self._token_counts(taken, access.source.tokens_of),
        )

    def report(self) -> Report:
        """Return a report to print: what limits training, what that costs, and which setting to change.

        The report covers the latest 256 batches. Batches that were read before the loop began do not count.

        Raises:
          ValueError: too few batches were delivered.
        """
        report = self._listener.report()
        if report is None:
            raise ValueError(
                "a report needs more batches that were read after the loop began; this feed has delivered "
                f"{self._counted.batches} in all; call report() after more steps"
            )
        return report

    @contextlib.contextmanager
    def diagnose(self, steps: int = 200, *, over: Callable[[], None] | None = None) -> Iterator[Diagnosis]:
        """Measure what each stage costs a training loop, by leaving stages out. Prints the result.

        The loop in this context gets four phases of `steps` / 4 batches: batches as they are, the same rows read
        again (from the page cache), one host batch placed again and again, and one batch that stays on the
        devices. After these, or an error in `next`, loops in the context get no batch. Once the context is left,
        the feed is where it was, so no row is lost. But the loop trains on repeated batches: give it a copy of the
        training state. With several processes, all of them must call it.

        Args:
          steps: batches in all four phases together; with the default buffers, at least 40. The first quarter of
            each phase does not count, or its first six batches (with the default buffers) if these are more.
          over: called by `next`, on the loop's thread, when the last phase is over and the loop is about to end.

        Returns:
          A context manager. Its value is a `Diagnosis`, which is complete once the context is left.

        Raises:
          ValueError: too few steps; or the feed is being diagnosed already.

        Example:
          >>> import jax, numpy as np
          >>> from feedline import Feed
          >>> feed = Feed({"x": np.zeros((64, 2))}, 8, jax.devices()[0])
          >>> with feed.diagnose(steps=40) as diagnosis:  # doctest: +ELLIPSIS
          ...     for batch in feed:
          ...         total = float(batch["x"].sum())
          a step takes ...
          >>> 0 < diagnosis.au <= 1
          True
          >>> feed.close()
        """
        from feedline._src.listen.diagnosis import DiagnosingPipeline, Diagnosis

        steps = checked_integer("steps", steps, at_least=1, at_most=MAX_COUNT)
        with self._single_thread:
            self._check_not_diagnosed("is not diagnosed again")
            # one batch size, no tuning, and no counts that other processes compare
            stages = dataclasses.replace(self._stages, bounds=None, in_step=None)
            sizes = dataclasses.replace(self._sizes, by_step=((0, stages),))
            diagnosis, listener, (_, after, lanes) = Diagnosis(), FeedListener(stages), self._delivered
            pipeline = DiagnosingPipeline(stages, after, lanes, listener, steps, diagnosis, over)
            self._stop(GRACE_S, reads=False)
            self._switch(self._stages)  # after `_stop`: the pipeline in `_run` has the batch size of `_running`
            self._listener.interrupted()  # the diagnosis is not the loop's own time
        before = (self._delivered, self._exhausted, self._counted, self._loop_began, self._moved_from)
        used = (self._sizes, self._running, self._listener)
        try:
            self._sizes, self._running, self._listener = sizes, stages, listener
            self._diagnosed, self._loop_began, self._exhausted = pipeline, None, False
            self._runs.add(pipeline, workers=stages.settings.workers > 0)
            self._run = pipeline
            yield diagnosis
            pipeline.finish()
        finally:
            # first, because an interrupt may come while threads are stopped
            self._delivered, self._exhausted, self._counted, self._loop_began, self._moved_from = before
            self._sizes, self._running, self._listener = used
            self._diagnosed = self._run = None
            self._stop(GRACE_S, reads=False)
            pipeline.forget()
        print(diagnosis)

    def trace(self, path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[Path]:
        """Record what threads do for each batch, in a file for https://ui.perfetto.dev.

        The file holds the batches that are delivered in this context, or the latest if there are very many (see
        docs/waiting.md). It is written when the context is left, even by an exception. If writing fails, as on a
        full disk, a warning says why, and training continues.

        Args:
          path: where to write the file, compressed if the path ends in ".gz". With several processes, each writes
            its own file: "trace.json" becomes "trace-process0.json", and so on.

        Returns:
          A context manager. Its value is the path that this process writes.

        Raises:
          ValueError: the feed is being traced already, or diagnosed.
          OSError: `path` is a folder, or its folder is missing or not writable.

        Example:
          >>> import jax, json, numpy as np, tempfile
          >>> from feedline import Feed
          >>> feed = Feed({"x": np.zeros((64, 2))}, 8, jax.devices()[0], epochs=1)
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     with feed.trace(f"{folder}/trace.json") as path:
          ...         for batch in feed:
          ...             total = float(batch["x"].sum())
          ...     trace = json.loads(path.read_text())
          >>> sum(event["name"] == "step" for event in trace["traceEvents"])
          8
          >>> feed.close()
        """
        self._check_not_diagnosed("is not traced")
        from feedline._src.listen.trace import traced

        return traced(path, self._sizes, self._listener)

    def __repr__(self) -> str:
        if "_runs" not in vars(self):
            return "<feedline.Feed: not built>"
        rows, form = self._stages.fingerprint["rows"], self._stages.fingerprint["format"]
        leaves, name_of = jax.tree_util.tree_leaves_with_path(self.spec), jax.tree_util.keystr
        shown = [
            f"{name_of(path, simple=True, separator='.') or 'batch'}: {leaf.dtype.name}{list(leaf.shape)}"
            for path, leaf in leaves[:_MAX_LEAVES_SHOWN]
        ]
        if len(leaves) > _MAX_LEAVES_SHOWN:
            shown.append(f"and {len(leaves) - _MAX_LEAVES_SHOWN} more")
        is_shuffled = self.order is not None and getattr(self.order, "shuffle", True)
        facts = {
            "rows": f"of {form}" if rows is None else "endless" if rows == ENDLESS else f"{rows:,}",
            "batch_size": f"{self.batch_size:,}",
            "remainder": self.remainder,
            "epochs": "endless" if self.epochs is None else f"{self.epochs:,}",
            "order": repr(self.order) if is_shuffled else "the source's",
            "epoch": f"{self.epoch:,}",
            "position": f"{self.position:,}" + (", closed" if self._closed else ""),
            "spec": ", ".join(shown),
        }
        return f"<feedline.Feed: {', '.join(f'{name} {fact}' for name, fact in facts.items())}>"

    def _tune(self, settings: Settings) -> None:
        """Continue with other settings. Until the next pipeline is built, the listener keeps its proposal."""
        self._sizes = self._sizes.map(lambda stages: stages.tuned(settings))
        self._stop(0, reads=False)  # a stream's next iterator waits until this one is read no more

    def _switch(self, stages: Stages) -> None:
        """Use these stages for the next pipeline, and free the idle memory of the previous ones."""
        if stages is self._running:
            return
        self._listener.changed(stages)
        if stages.access.buffers is not self._running.access.buffers:
            self._running.access.buffers.staging.close()
        self._running = stages  # last, so that after an interrupt all of this is done again

    def _start(self) -> Run[Placed]:
        stages, place = self._stages, self._place()
        self._switch(stages)
        # after `seek` or `set_state`, compare the place with other processes; the same place as before is no move
        in_step = stages.in_step
        if in_step is not None and self._moved_from not in (None, place):
            if found := in_step.moved(place):
                raise out_of_step(found)
            self._moved_from, in_step.moves = None, in_step.moves + 1  # in one statement, as in `_go_to`
        self._moved_from = None
        _, cursor, lanes = self._delivered
        run = run_of(stages, cursor, lanes, stages.placer(self._listener.placed))
        self._runs.add(run, workers=stages.settings.workers > 0)
        self._check_open()  # another thread may have closed the feed in the meantime
        run.start()  # only after `add`, so that `close` finds it
        return run

    def _place(self) -> Place:
        stages = self._stages
        cursor = stages.access.next_cursor(self._delivered.cursor)
        mixed = stages.in_step is not None and stages.access.source.own_order == "mixture"
        return Place(self._delivered.step, *cursor, states.digest(stages.fingerprint["order"]) if mixed else "")

    def _stop(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """Give up the pipeline, and join the threads of all pipelines. `reads` and the result: see `Run.join`."""
        self._run = None
        return self._runs.stop(timeout_s, reads=reads)

    def _go_to(self, delivered: Delivered, sizes: Sizes) -> None:
        with self._single_thread:
            self._check_not_diagnosed("stays where it is")
            sizes.at(delivered.step).access.check_cursor(delivered.cursor, delivered.lanes)
            moved_from = self._moved_from or self._place()
            self._stop(GRACE_S, reads=False)
            self._loop_began = None
            self._listener.interrupted()
            self._moved_from = moved_from
            # last, and in one statement: an interrupt comes before or after it
            self._sizes, self._delivered, self._exhausted = sizes, delivered, False

    def _check_not_diagnosed(self, rule: str) -> None:
        self._check_open()
        if self._diagnosed is not None:
            raise ValueError(f"a feed {rule} while it is diagnosed; leave the context of diagnose first")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(CLOSED)
        self._check_not_forked()

    def _check_not_taking(self) -> None:
        """Raise if `next` was called inside of `next`, on the same thread.

        Inspects the stack, since an attribute could stay set after an interrupt.
        """
        frame: FrameType | None = sys._getframe()
        kind: Any = type(self)
        calls, code = 0, kind.__next__.__code__
        while frame is not None:
            calls += frame.f_code is code and frame.f_locals["self"] is self
            frame = frame.f_back
        if calls > 1:
            raise ValueError(INSIDE)
