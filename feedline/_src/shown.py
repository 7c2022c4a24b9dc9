"""What a feed shows without moving: its properties, its `repr`, statistics, report, trace and diagnosis."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src import state as states
from feedline._src.feed_options import FeedOptions
from feedline._src.life import MOMENT_S, Life
from feedline._src.listen.listening import FeedListener
from feedline._src.listen.statistics import Statistics
from feedline._src.options import Reading
from feedline._src.order.schedule import Remainder

if TYPE_CHECKING:
    from feedline._src.listen.diagnosis import Diagnosis
    from feedline._src.listen.report import Report

_MAX_LEAVES_SHOWN = 12


class Shown(Life):
    """The part of `Feed` that only reads. But for `diagnose` it works from any thread and on a closed feed."""

    @property
    def options(self) -> FeedOptions:
        """What the feed was asked for."""
        return self._options

    @property
    def batch_size(self) -> int:
        """Rows in the next global batch."""
        return self._next_stages.access.batch_size

    @property
    def order(self) -> Any:
        """Of the rows. `Order(shuffle=False)`: the source's own, as Grain datasets keep it. None: a stream's."""
        order = self._stages.access.order
        return None if order is None else order.shown

    @property
    def epochs(self) -> int | None:
        """Of one pass; None: endless."""
        return self._options.epochs

    @property
    def remainder(self) -> Remainder:
        """What becomes of rows that do not fill a batch: "drop", "pad" or "wrap"."""
        return self._options.remainder

    @property
    def reading(self) -> Reading:
        """The reading options, with the numbers of threads, workers and buffers that are in use now."""
        threads, workers, buffer, _ = self._stages.settings
        return dataclasses.replace(self._stages.reading, threads=threads, workers=workers, buffer=buffer)

    @property
    def prefetch(self) -> int:
        """Placed batches that wait, at the most; 0: synchronous. The number that is in use now."""
        return self._stages.settings.prefetch

    @property
    def steps_per_call(self) -> int:
        """Batches that `next` gives at once."""
        return self._options.steps_per_call

    def __len__(self) -> int:
        """How often a pass delivers: batches ÷ `steps_per_call`.

        TypeError if it is endless, or a stream, or if the batch size changes.
        """
        if self._sizes.changes:
            raise TypeError(
                "passes differ in length where the batch size changes; bound the loop by zip(range(n), feed)"
            )
        return self._stages.access.deliveries()

    @property
    def spec(self) -> Any:
        """The next batch as `jax.ShapeDtypeStruct`s with shardings, before the first one: to lower and compile."""
        return self._next_stages.placement.spec

    @property
    def epoch(self) -> int:
        """Epoch of the next batch; the last one's while the pass is exhausted."""
        return self._next_stages.access.next_cursor(self._delivered.cursor).epoch

    @property
    def position(self) -> int:
        """Position in its epoch of the next batch's first row."""
        return self._next_stages.access.next_cursor(self._delivered.cursor).position

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, for remainder "drop" and "pad". TypeError for "wrap" and for streams.

        If the batch size changes: as many as if each had the size of the next one.
        """
        return self._next_stages.access.steps_per_epoch()

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint holds, as JSON values: the place after the last batch *delivered*.

        Equal on every process, except for a stream with several lanes: there it holds those that this process
        reads, and `feedline.save_lanes` saves them all. With random access it is a few integers and the spec of a
        row: under 1 KB for up to some twenty leaves.
        """
        delivered = self._delivered
        lanes = self._stages.access.lanes_for_state(delivered.lanes)
        return states.make(delivered.step, delivered.cursor, self._stages.fingerprint, **lanes)

    def rows_of(self, state: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        """Which rows the batch holds that comes next after `state`. Reads no data.

        After the last batch of a pass that is the first one of the next pass.

        Returns:
          int64[batch_size]: row indices in the source, in the order of the global batch; -1 where it
          is padded. With several steps per call, int64[steps_per_call, batch_size].
        """
        step, cursor = states.check(state, self._stages.fingerprint, ())
        return (self._sizes.at(step) if self._sizes.changes else self._stages).access.rows_of(cursor)

    def statistics(self) -> Statistics:
        """An immutable snapshot of what was done so far."""
        ready = self._runs.waiting
        statistics = self._listener.statistics(self._counted, ready)
        access = self._stages.access
        taken = access.taken_before(self._delivered.cursor)
        return dataclasses.replace(
            statistics,
            source_epochs={each.name: each.rows / each.order.rows for each in taken if each.name} or None,
            tokens=self._token_counts(taken, access.tokens_of),
        )

    def report(self) -> Report:
        """What limits training, what that costs, and which setting to change. It may be printed.

        Judged by the latest batches, at most 256, after those that were read ahead before the loop began.

        Raises:
          ValueError: fewer than two batches were delivered one after the other.
        """
        report = self._listener.report()
        if report is None:
            raise ValueError(
                "a report needs two batches that were taken one after the other, and this feed delivered "
                f"{self._counted.batches}; call it after some steps"
            )
        return report

    @contextlib.contextmanager
    def diagnose(self, steps: int = 200, *, over: Callable[[], None] | None = None) -> Iterator[Diagnosis]:
        """Measure what each stage costs a training loop, by leaving stages out. Prints the result.

        The loop in this context gets batches as they are, then the same rows read again (from the page cache),
        then one host batch placed again and again, then one batch that stays on the devices: a quarter of `steps`
        each. Then the loop ends; further loops in the context get no batch. After it the feed is where it was, so
        nothing is lost. But the loop has trained on repeated batches: give it a copy of its state. With several
        processes, all of them call it.

        Args:
          steps: batches of all phases; at least 40 with the default buffers. Six of each phase do not count.
          over: called by `next`, on the loop's thread, when the last phase is over and the loop is about to end.

        Returns:
          The context's value is a `Diagnosis`, complete when the context is left.

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

        if self._diagnosed is not None:
            raise ValueError("this feed is being diagnosed already; leave that context first")
        with self._single_thread:
            self._check_open()
            self._use(self._next_stages)
            diagnosis, listener, delivered = Diagnosis(), FeedListener(self._stages, tunes=False), self._delivered
            pipeline = DiagnosingPipeline(
                self._stages, delivered.cursor, delivered.lanes, listener, steps, diagnosis, over
            )
            self._stop(MOMENT_S, reads=False)
        before = (delivered, self._exhausted, self._counted, self._listener, self._loop_began)
        try:
            self._diagnosed, self._listener, self._loop_began, self._exhausted = pipeline, listener, None, False
            self._runs.add(pipeline, workers=self._stages.settings.workers > 0)
            self._run = pipeline
            yield diagnosis
            pipeline.finish()
        finally:
            # first of all, in case an interrupt comes while threads are stopped
            self._delivered, self._exhausted, self._counted, self._listener, self._loop_began = before
            self._diagnosed = None
            self._listener.interrupted()
            self._stop(MOMENT_S, reads=False)
            pipeline.forget()
        print(diagnosis)

    def trace(self, path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[Path]:
        """Draw what each thread does for each batch: a file for https://ui.perfetto.dev.

        It holds the batches that are delivered in this context; of very many the latest (see docs/waiting.md). The
        file is written when the context is left, also by an exception. If that fails, as on a full disk, a warning
        says why, and training goes on.

        Args:
          path: of the file, compressed if it ends in ".gz". With several processes each writes its own:
            "trace.json" becomes "trace-process0.json", and so on.

        Returns:
          The context's value is the path that this process writes.

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
        self._check_open()
        if self._diagnosed is not None:
            raise ValueError("a feed that is being diagnosed cannot be traced; leave that context first")
        from feedline._src.listen.trace import traced

        return traced(path, self._stages, self._listener.accounts)

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
        facts = {
            "rows": f"of {form}" if rows is None else f"{rows:,}",
            "batch_size": f"{self.batch_size:,}",
            "remainder": self.remainder,
            "epochs": "endless" if self.epochs is None else f"{self.epochs:,}",
            "order": "its own" if self.order is None else repr(self.order),
            "epoch": f"{self.epoch:,}",
            "position": f"{self.position:,}" + (", closed" if self._closed else ""),
            "spec": ", ".join(shown),
        }
        return f"<feedline.Feed: {', '.join(f'{name} {fact}' for name, fact in facts.items())}>"
