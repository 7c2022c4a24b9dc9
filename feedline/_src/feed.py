"""`Feed`: the iterator of global batches. What a batch passes is composed in `run.py`."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable
from typing import Any

import grain

from feedline._src.agreement.monitor import failure, out_of_step
from feedline._src.build import refuse_everywhere
from feedline._src.errors import ProcessError, StallError, warn
from feedline._src.feed_base import CLOSED, GRACE_S, Delivered, FeedBase
from feedline._src.feed_options import FeedOptions
from feedline._src.options import Auto, Order, Reading
from feedline._src.order.schedule import BatchSizes, Remainder
from feedline._src.placement.place import Placed
from feedline._src.plan.asked import Transform
from feedline._src.prefetch.pipelines import Closed, Run
from feedline._src.record import BatchRecord, Counters
from feedline._src.runtime.exit import exits
from feedline._src.runtime.threads import annotation

_log = logging.getLogger("feedline")
_AT_EXIT = (
    "feeds are closed when the interpreter exits, and that begins once the main thread has ended; join the "
    "threads that use a feed before that"
)


class Feed(FeedBase):
    """An iterator of global batches that already lie on the mesh when they are asked for.

    A feed is its own iterator, for one thread at a time. `iter` after exhaustion goes on with the
    next `epochs` epochs, so each loop over an evaluation feed is a pass. A loop that begins in the middle of
    a pass finishes that pass; `seek(0)` begins it again. Bound a loop by ``zip(range(n), feed)``, never by
    ``zip(feed, range(n))``, which takes a batch and drops it.

    After an exception nothing is lost: `next` reads again from the last batch delivered.

    Args:
      source: a tree of arrays and `.npy` paths | a path or glob | a `RowSource` | a `feedline.Mixture` | a
        `grain.MapDataset` | a `grain.IterDataset` | `feedline.Lanes` | an object with `__len__` and
        `__getitem__`. Elements and items must each have memory of their own.
      batch_size: rows in the GLOBAL batch. Or sizes that change at given steps: [(0, 256), (1000, 512)], each with
        the number of batches delivered before the first one of that size. For rows with random access.
      sharding: of the batch: one `jax.sharding.Sharding`, or a tree of them that is a prefix of the
        batch, as jit's `in_shardings`. A bare device or, under `jax.set_mesh`, a bare `PartitionSpec`
        stands for its sharding.
      order: which row stands at which position. None: shuffled with seed 0 for rows, the dataset's
        own order for Grain datasets. A stream has no other.
      epochs: of one pass; None: endless.
      remainder: of rows that do not fill a batch. "drop" leaves them out. "pad" repeats rows of the
        same epoch and adds a boolean leaf `valid`, False there; the batch must be a dict. "wrap"
        runs over the ends of epochs.
      reading: threads, workers and buffers of the host, and what becomes of bad rows.
      transform: (batch, rows) → batch, on the host: NumPy trees; row i of the result depends only
        on row i of the batch, random numbers on `rows.key`. `rows` is a `feedline.Rows`.
      prefetch: placed batches that wait, at the most. 0: synchronous, all on the caller's thread, for
        debugging; another one only warns of a `next` that hangs. At least 2 are needed to overlap
        transfer and compute on a GPU. "auto": found while the feed runs, as `Reading` describes it.

      steps_per_call: K. With more than 1, `next` gives K batches at once, as leaves [K, B, ...] of which the
        second axis is sharded as the batch's first: for K training steps in one `lax.scan`. States count K steps.
        K divides the batches of a pass. For rows that threads read, not for streams and workers.
      with_place: add the leaf `place`, int32[batch_size], sharded as the batch axis: one number for all rows of a
        batch, made of its place in the data. In a step, ``batch["place"].max() != batch["place"].min()`` says that
        processes are out of step. The batch must be a dict.
      name: of the feed, such as "train". With several processes, those that build feeds of other names at the same
        time raise at once. None: feeds are only counted.

    Host bytes = (reading.buffer + 1) × process-local batch. Device bytes = (prefetch + 2) × shard. With several
    steps per call both are as many times as large.

    Raises:
      ValueError, TypeError: an argument is wrong; the message says which change would work.
      FileNotFoundError: there is no such file.
      ProcessError: on a mesh of several processes, which all build the feed: one of them builds another one,
        failed, or did not come.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
      >>> mesh = Mesh(np.array(jax.devices()), ("data",))
      >>> rows = {"x": np.arange(320, dtype=np.float32).reshape(160, 2), "y": np.arange(160, dtype=np.int32)}
      >>> with Feed(rows, batch_size=16, sharding=NamedSharding(mesh, P("data")), epochs=1) as feed:
      ...     shapes = {batch["x"].shape for batch in feed}
      >>> shapes
      {(16, 2)}
    """

    _name = "a feed"
    _instead = "build another one, and call its set_state with this one's get_state()"

    def __init__(
        self,
        source: Any,
        batch_size: int | BatchSizes,
        sharding: Any,
        *,
        order: Order | None = FeedOptions.order,
        epochs: int | None = FeedOptions.epochs,
        remainder: Remainder = FeedOptions.remainder,
        reading: Reading = FeedOptions.reading,
        transform: Transform | None = FeedOptions.transform,
        prefetch: int | Auto = FeedOptions.prefetch,
        steps_per_call: int = FeedOptions.steps_per_call,
        with_place: bool = FeedOptions.with_place,
        name: str | None = FeedOptions.name,
    ) -> None:
        try:
            options = FeedOptions(
                source,
                batch_size,
                sharding,
                order=order,
                epochs=epochs,
                remainder=remainder,
                reading=reading,
                transform=transform,
                prefetch=prefetch,
                steps_per_call=steps_per_call,
                with_place=with_place,
                name=name,
            )
        except (ValueError, TypeError) as error:
            refuse_everywhere(sharding, error)
            raise
        self._build(options)

    @classmethod
    def from_options(cls, options: FeedOptions) -> Feed:
        """A feed of what `options` ask for. Raises what `Feed(...)` raises."""
        feed = cls.__new__(cls)
        feed._build(options)
        return feed

    def __iter__(self) -> Feed:
        """Itself. After exhaustion the next pass begins; in the middle of a pass it goes on with that one.

        The latter warns if `iter` began that pass, too: a loop over a list would begin anew.
        """
        self._check_open()
        if self._diagnosed is not None and self._exhausted:
            self._diagnosed.check_further_pass()
        elif self._exhausted:
            cursor = self._stages.access.next_pass(self._delivered.cursor)
            delivered = self._delivered._replace(cursor=cursor, lanes=None)
            self._delivered, self._exhausted = delivered, False
        self._warn_of_partial_pass()
        return self

    def __next__(self) -> Any:
        """The next global batch.

        Raises:
          StopIteration: the pass is exhausted.
          ValueError: the feed is closed, or another thread is inside it.
          FeedError: a row, a worker or a stage failed. What was delivered stays delivered.
        """
        for hook in self._asked:
            hook(self)
        asked = time.perf_counter()
        with self._single_thread:
            if self._closed or self._process != os.getpid():  # in here: each call costs the training thread
                self._check_open()
            if self._run is None:
                self._check_not_taking()
            if self._exhausted:
                raise StopIteration
            try:
                return self._next(asked)
            except BaseException as error:
                self._give_up(error)
                raise

    def _next(self, asked: float) -> Any:
        """Take a batch, count it, and tell the listener. `asked`: when `next` was called."""
        if len(self._runs.alive) > 1:
            self._runs.remove_ended(self._run)
        steps = self._options.steps_per_call
        if self._sizes.changes and self._diagnosed is None and self._stages is not self._running:
            self._stop(0, reads=False)
        if (proposal := self._listener.proposal) is not None:
            self._tune(proposal)
        with annotation("wait", step=self._delivered.step + steps):
            run, placed = self._take()
        before = self._delivered  # a signal handler may have taken one meanwhile
        _, after, lanes, rows, dropped_rows, parts, bad = placed.metadata
        delivered = Delivered(before.step + steps, after, lanes)
        counted = self._counted
        counted = Counters(
            counted.batches + steps,
            counted.rows + rows,
            counted.dropped_rows + dropped_rows,
            counted.bad_rows + len(bad),
            counted.placed_bytes + self._running.placement.local_bytes,
        )
        record = BatchRecord(
            asked, time.perf_counter(), parts, placed.times,
            delivered.step, before.cursor, rows, bad, counted.batches,
        )  # fmt: skip
        self._listener.delivered(record)
        if self._running.in_step is not None and self._diagnosed is None:
            self._running.in_step.batches = counted.batches // steps
        # last, and at once: an interrupt comes before all or counts as one after `next`
        self._counted, self._delivered, self._run = counted, delivered, run
        if self._closed:  # meanwhile, by another thread or a signal handler
            self._run = None
        return placed.batch

    def _give_up(self, error: BaseException) -> None:
        """Give up the run after an error of `next`, or its end."""
        self._loop_began = None
        if self._running.in_step is not None and not isinstance(error, StopIteration):
            self._running.in_step.failed_at = self._running.in_step.batches
        self._listener.interrupted()
        stuck = self._closed or isinstance(error, StallError | ProcessError) or not isinstance(error, Exception)
        self._stop(0 if stuck else GRACE_S, reads=False)

    def _take(self) -> tuple[Run[Placed], Placed]:
        """The next item, and its run. If there is none, one is started after the last batch delivered.

        The feed has no run until that item is delivered. So after an interrupt, or several, the next call starts
        another one, as this one may not have been started, or may have lost an item.
        """
        try:
            run, self._run = self._run, None
            run = run or self._start()
            return run, run.take()
        except StopIteration as end:
            dropped = self._counted.dropped_rows + end.value
            self._counted, self._exhausted = self._counted._replace(dropped_rows=dropped), True
            raise StopIteration from None
        except Closed:
            raise failure() or ValueError(_AT_EXIT if exits() and not self._closed else CLOSED) from None
        except Exception as error:
            # threads read again from the last batch delivered. If it is the data that is bad, they raise it, too
            if isinstance(error, ProcessError) or (start := self._listener.give_up_workers(error)) is None:
                raise
            self._tune(start)
            return self._take()

    def _warn_of_partial_pass(self) -> None:
        """Warn if `iter` began this pass before, and batches of it were taken since.

        A `next` before any `iter` shows that the feed is meant as an iterator; so is an endless feed.
        """
        step, began, epochs = self._delivered.step, self._loop_began, self.epochs
        if began is None:
            self._loop_began = step
        elif step > began and epochs is not None:
            warn(
                f"this loop goes on in the middle of a pass: {step - began} of its batches were taken since "
                "iter(feed) or a loop began it, and are not seen here. To begin the pass again, call "
                f"feed.seek({self._delivered.cursor.epoch // epochs * epochs}) before the loop; to go on without "
                "this warning, take batches by next(feed)"
            )
            self._loop_began = step

    def close(self, timeout_s: float = 30) -> None:
        """Stop reading and let go of everything. Idempotent, from any thread.

        Args:
          timeout_s: how long to wait for the threads, and for reads ahead that are under way. One that is stuck
            in a read is named in a warning, and ends with the process at the latest; its source stays open.
            Called by a thread that reads, as in a transform, it waits for none: call it again.

        Raises:
          ProcessError: another process closed this feed after another number of batches. Not raised while an
            exception is handled.
        """
        if self._is_forked():
            return  # all that could be closed is the parent's
        # an exception says more than the counts that it leaves, and so does what ends a `next` of another thread
        compares = not self._closed and not self._single_thread.occupied and sys.exc_info()[0] is None
        self._closed = True
        stuck = self._stop(timeout_s)
        if stuck:
            if stuck != threading.current_thread().name:
                _log.warning(
                    "%s is still busy with a read or a transfer %g s after close, so the source stays open",
                    stuck,
                    timeout_s,
                )
        elif not self._released:
            self._released = True
            self._sizes.close()
        in_step = self._stages.in_step
        if compares and in_step is not None and failure() is None and (found := in_step.closed()):
            raise out_of_step(found)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- other names: those of a `grain.DatasetIterator`, and Orbax's protocol of version 1 ---

    @property
    def element_spec(self) -> Any:
        """The `spec`, by the name that it has in Grain."""
        return self.spec

    def start_prefetch(self) -> None:
        """Begin to read ahead: Grain's name of `start`."""
        self.start()

    async def save(self, directory: Any) -> Awaitable[None]:
        """Save the state for `orbax.checkpoint.experimental.v1`, of which a feed is a checkpointable.

        Args:
          directory: Orbax's path, which is being created.
        """
        state = self.get_state()  # before the feed goes on

        async def write() -> None:
            from feedline._src.loader.lane_files import write_state

            write_state(await directory.await_creation(), state)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Go on from a state that `save` wrote; errors as of `set_state`, and of `feedline.load_lanes`."""

        async def read() -> None:
            from feedline._src.loader.lane_files import read_state

            self.set_state(read_state(directory))

        return read()


grain.DatasetIterator.register(Feed)  # handlers written for Grain's iterators ask for their class
