"""`Feed`: the iterator of global batches. `run.py` composes the stages that a batch passes through."""

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
    "feeds are closed when the interpreter exits, and the exit begins once the main thread has ended; join the "
    "threads that use a feed before that"
)


class Feed(FeedBase):
    """An iterator of global batches, which are already on the mesh when the training loop asks for them.

    A feed is its own iterator, for one thread at a time. After exhaustion, `iter` begins the next pass of `epochs`
    epochs, so each loop over an evaluation feed is one pass. A loop that begins in the middle of a pass finishes
    that pass; `seek(0)` goes back to epoch 0. Bound a loop with ``zip(range(n), feed)``, never
    with ``zip(feed, range(n))``, which takes one more batch and drops it.

    After an exception nothing is lost: the following `next` restarts after the last batch delivered.

    Args:
      source: a tree of arrays and `.npy` paths | a path or glob | a `RowSource` | a `feedline.Mixture` | a
        `grain.MapDataset` | a `grain.IterDataset` | `feedline.Lanes` | an object with `__len__` and
        `__getitem__`. Each element or item must have its own memory, not a buffer that the next one overwrites.
      batch_size: rows in the GLOBAL batch. Or sizes that change at given steps, as (first step, size) pairs: with
        [(0, 256), (1000, 512)], the first 1000 batches have 256 rows, and later ones 512. Not for streams.
      sharding: the batch's sharding: one `jax.sharding.Sharding`, or a tree of shardings that is a prefix of the
        batch, like jit's `in_shardings`. A device is accepted, too, and under `jax.set_mesh` a `PartitionSpec`.
      order: which row stands at which position. None: a Grain dataset keeps its own order; the rows of any other
        source are shuffled with seed 0. A stream accepts only None.
      epochs: the number of epochs in a pass; None: endless.
      remainder: what to do with rows at the end of an epoch that do not fill a batch. "drop" leaves them out.
        "pad" fills the batch with repeated rows of the same epoch, and adds a boolean leaf `valid`, which is False
        for the repeated rows; the batch must be a dict. "wrap" fills the batch with rows of the next epoch.
      reading: threads, workers and buffers on the host, and what to do with bad rows.
      transform: (batch, rows) → batch, on the host. Batches are trees of NumPy arrays; `rows`: a `feedline.Rows`.
        Row i of the result must depend only on row i of the batch, and random numbers only on `rows.key`.
      prefetch: how many placed batches may wait. 0: synchronous, for debugging: the caller's thread does
        everything, and another thread only warns if a `next` hangs. At least 2 are needed to overlap
        transfer and compute on a GPU. "auto": the feed tunes it while it runs, as `Reading` describes.

      steps_per_call: K. If K > 1, `next` returns K batches at once, for K training steps in one `lax.scan`: leaves
        [K, B, ...], whose second axis is sharded like a batch's first axis. In a state, one call counts as K
        steps. K must divide the number of batches in a pass. Not for streams, and not with workers.
      with_place: add the leaf `place`, int32[batch_size], sharded like the batch axis. Each process fills its
        rows of a batch with one number, derived from the batch's place in the data. So in a step,
        ``batch["place"].max() != batch["place"].min()`` means that processes are out of step. The batch must be a
        dict.
      name: the feed's name, such as "train". If processes build feeds of different names at the same time, all
        raise an error. None: feeds are matched only by the order in which they are built.

    Host bytes = (reading.buffer + 1) × process-local batch. Device bytes = (prefetch + 2) × shard. With K steps
    per call, both are K times as large.

    Raises:
      ValueError, TypeError: an argument is wrong; the message says which change would work.
      FileNotFoundError: there is no such file.
      ProcessError: another process of the mesh built a different feed, failed, or did not arrive. All processes
        of a mesh must build the feed.

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
    _instead = "build another feed, and call its set_state with this feed's get_state()"

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
        """A feed with these options. Raises what `Feed(...)` raises."""
        feed = cls.__new__(cls)
        feed._build(options)
        return feed

    def __iter__(self) -> Feed:
        """Return the feed. If the pass is exhausted, the next pass begins; otherwise, the current pass continues.

        Warns if an earlier `iter` began this pass: unlike a loop over a list, this loop does not start over.
        """
        self._check_open()
        if self._diagnosed is not None and self._exhausted:
            self._diagnosed.check_further_pass()
        elif self._exhausted:
            cursor = self._stages.access.next_pass(self._delivered.cursor)
            self._delivered, self._exhausted = Delivered(self._delivered.step, cursor, None), False
        self._warn_of_partial_pass()
        return self

    def __next__(self) -> Any:
        """The next global batch.

        Raises:
          StopIteration: the pass is exhausted.
          ValueError: the feed is closed, or another thread is inside it.
          FeedError: a row, a worker or a stage failed. Delivered batches stay delivered.
        """
        for hook in self._asked:
            hook(self)
        asked = time.perf_counter()
        with self._single_thread:
            if self._closed or self._process != os.getpid():  # inlined, since a call would cost time
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
        """Take a batch, count it, and pass its record to the listener. `asked`: when `next` was called."""
        if len(self._runs.alive) > 1:
            self._runs.remove_ended(self._run)
        steps = self._options.steps_per_call
        if self._sizes.changes and self._stages is not self._running:
            self._stop(0, reads=False)
        if (proposal := self._listener.proposal) is not None:
            self._tune(proposal)
        with annotation("wait", step=self._delivered.step + steps):
            run, placed = self._take()
        before = self._delivered  # read only now: a signal handler may have taken a batch meanwhile
        _, after, lanes, rows, dropped_rows, parts, bad = placed.metadata
        delivered = Delivered(before.step + steps, after, lanes)
        counted = self._counted
        counted = Counters(
            counted.batches + steps,
            counted.rows + rows,
            counted.dropped_rows + dropped_rows,
            counted.bad_rows + len(bad),
            counted.placed_bytes + self._running.placement.local_bytes,
            counted.own_rows + steps * len(self._running.access.form.part.rows),
        )
        record = BatchRecord(
            asked, time.perf_counter(), parts, placed.times,
            delivered.step, before.cursor, rows, bad, counted.own_rows,
        )  # fmt: skip
        self._listener.delivered(record)
        if self._running.in_step is not None:
            self._running.in_step.batches = counted.batches // steps
        # last, and in one statement: after an interrupt, this batch is either delivered or will be read again
        self._counted, self._delivered, self._run = counted, delivered, run
        if self._closed:  # meanwhile, by another thread or a signal handler
            self._run = None
        return placed.batch

    def _give_up(self, error: BaseException) -> None:
        """Give up the pipeline after an error in `next`, or at the end of the pass."""
        self._loop_began, self._exhausted = None, self._exhausted or self._diagnosed is not None
        if self._running.in_step is not None and not isinstance(error, StopIteration):
            self._running.in_step.failed_at = self._running.in_step.batches
        self._listener.interrupted()
        stuck = self._closed or isinstance(error, StallError | ProcessError) or not isinstance(error, Exception)
        self._stop(0 if stuck else GRACE_S, reads=False)

    def _take(self) -> tuple[Run[Placed], Placed]:
        """Take a placed batch from the pipeline. If there is none, start one after the last batch delivered.

        `_run` is None until the batch is delivered. So after an interrupt, the next call starts a new pipeline,
        because the interrupted one may not have been started, or may have lost a batch.
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
            # if tuning chose workers, continue with threads; if the data is bad, the threads raise the error again
            if isinstance(error, ProcessError) or (start := self._listener.give_up_workers(error)) is None:
                raise
            self._tune(start)
            return self._take()

    def _warn_of_partial_pass(self) -> None:
        """Warn if an earlier `iter` began this pass, and batches of it were taken since.

        Batches that `next` took before the first `iter` cause no warning, since such a feed is used as an
        iterator. An endless feed never warns.
        """
        step, began, epochs = self._delivered.step, self._loop_began, self.epochs
        if began is None:
            self._loop_began = step
        elif step > began and epochs is not None:
            warn(
                f"this loop goes on in the middle of a pass: {step - began} of its batches were taken already, by "
                "another loop or after iter(feed), so this loop does not get them. To begin the pass again, call "
                f"feed.seek({self._delivered.cursor.epoch // epochs * epochs}) before the loop; to go on without "
                "this warning, take batches by next(feed)"
            )
            self._loop_began = step

    def close(self, timeout_s: float = 30) -> None:
        """Stop reading and release everything. Idempotent; any thread may call it.

        Args:
          timeout_s: how long to wait for the threads and their reads in flight. If a thread is still stuck, a
            warning names it, and the source stays open; the thread ends with the process at the latest. If a
            transform calls `close` on a reading thread, `close` does not wait: call it again later.

        Raises:
          ProcessError: another process closed this feed after a different number of batches. Not raised while
            an exception is handled.
        """
        if self._is_forked():
            return  # all that could be closed belongs to the parent process
        # compare no counts after an exception, which explains more than they do, or while a thread is in `next`
        compares = not self._closed and not self._single_thread.occupied and sys.exc_info()[0] is None
        self._closed = True
        stuck = self._stop(min(timeout_s, threading.TIMEOUT_MAX))
        if stuck:
            if stuck != threading.current_thread().name:
                _log.warning(
                    "%s is still busy with a read or a transfer %g s after close, so the source stays open",
                    stuck,
                    timeout_s,
                )
        elif next(self._releases, False):
            self._running.access.buffers.staging.close()  # after a move, `_sizes` may lack `_running`
            self._sizes.close()
        in_step = self._stages.in_step
        if compares and in_step is not None and failure() is None and (found := in_step.closed()):
            raise out_of_step(found)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- the interface of a `grain.DatasetIterator`, and Orbax's protocol of version 1 ---

    @property
    def element_spec(self) -> Any:
        """`spec`, by Grain's name for it."""
        return self.spec

    def start_prefetch(self) -> None:
        """Begin to read ahead: Grain's name for `start`."""
        self.start()

    async def save(self, directory: Any) -> Awaitable[None]:
        """Save the state, called by `orbax.checkpoint.experimental.v1`, where a feed is a checkpointable."""
        state = self.get_state()  # before the feed continues

        async def write() -> None:
            from feedline._src.loader.lane_files import write_state

            write_state(await directory.await_creation(), state)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Continue from a state that `save` wrote. Raises what `set_state` and `feedline.load_lanes` raise."""

        async def read() -> None:
            from feedline._src.loader.lane_files import read_state

            self.set_state(read_state(directory))

        return read()


grain.DatasetIterator.register(Feed)  # handlers written for Grain's iterators check for that class
