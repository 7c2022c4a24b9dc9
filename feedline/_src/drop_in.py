"""`prefetch_to_mesh`: places and prefetches the batches of any iterator."""

from __future__ import annotations

import copy as copies
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from feedline._src.agreement.monitor import close_on_abort, failure
from feedline._src.cluster.cores import own_cores
from feedline._src.errors import StallError
from feedline._src.listen.accounts import Accounts
from feedline._src.listen.report import Report
from feedline._src.listen.statistics import Statistics
from feedline._src.listen.verdict import Circumstances, judge
from feedline._src.loader.staging import Staging
from feedline._src.options import MAX_AHEAD, Reading, Settings, checked_integer
from feedline._src.placement.place import Placed, Placement, prepare_jax
from feedline._src.plan.shardings import as_shardings, check_has_devices, sharded_like
from feedline._src.prefetch.pipelines import Closed
from feedline._src.prefetch.watch import Watch
from feedline._src.record import BatchRecord, PartTimes
from feedline._src.rows.spec import RowSpec, cast_into
from feedline._src.rows.values import as_array
from feedline._src.run import run_over
from feedline._src.runtime.exit import close_at_exit
from feedline._src.runtime.threads import JaxSettings, ProcessBound, SingleThread, Stopwatch, this_thread

_log = logging.getLogger("feedline")
_CLOSED = "the iterator is closed, by close() or by an interrupt; call prefetch_to_mesh again"
_STALLED = "feedline: call next again to go on waiting; prefetch_to_mesh has no such limit with prefetch=0"


def prefetch_to_mesh(
    iterable: Iterable[Any], sharding: Any, prefetch: int = 2, *, copy: bool = True
) -> MeshIterator:
    """Place and prefetch the process-local batches of an iterator. Returns an iterator of global arrays.

    Args:
      iterable: yields trees of NumPy arrays: for each global batch, this process's rows in ascending order (see
        `feedline.local_rows`), and its part of other sharded axes. With one process, a tree is a whole batch. One
        background thread calls the iterator. Leaves may also be `jax.Array`s on devices of this process, such as
        the output of a decoder on the GPU. They are copied from device to device, not through the host; an array
        on several devices in another layout, by way of one of them.
      sharding: the batch's sharding: one `jax.sharding.Sharding`, or a tree of shardings that is a prefix of the
        batch. A device is accepted, too, and under `jax.set_mesh` a `PartitionSpec`.
      prefetch: how many placed batches may wait; 0: synchronous.
      copy: True: copy each batch before the next one is requested, since many iterators reuse the memory of a
        batch, while JAX still reads it (GPU) or keeps it as the memory of an array (CPU backend). False: no copy;
        an array must not change after the iterator has yielded it.

    Returns:
      An iterator with `close()`, and with the `report()` and `statistics()` of a `feedline.Feed`. If your iterator
      has `get_state()`, the result has it, too: it returns your iterator's state after the last *delivered* batch,
      not after prefetched batches.

    Raises:
      TypeError, ValueError: an argument is wrong; or, in `next`, a batch does not fit the sharding.
      StallError: in `next`, after 300 s without a batch. The following `next` waits for the same batch.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
      >>> sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
      >>> batches = ({"x": np.full((8 * jax.device_count(), 2), i, np.float32)} for i in range(3))
      >>> [int(batch["x"][0, 0]) for batch in prefetch_to_mesh(batches, sharding)]
      [0, 1, 2]
    """
    sharding = as_shardings(sharding)
    check_has_devices(sharding)
    return MeshIterator(
        iterable, sharding, checked_integer("prefetch", prefetch, at_least=0, at_most=MAX_AHEAD), copy
    )


class _HostBatch(NamedTuple):
    """A batch of the user's iterator, or a copy of it, and the iterator's state after the batch."""

    spec: RowSpec
    leaves: list[Any]
    nbytes: int
    after: Any
    times: PartTimes


class MeshIterator(ProcessBound):
    """The iterator that `prefetch_to_mesh` returns. For one thread at a time; any thread may call `close`."""

    _name = "the iterator of prefetch_to_mesh"
    _instead = "call prefetch_to_mesh again, with a new iterator"

    def __init__(self, iterable: Iterable[Any], sharding: Any, prefetch: int, copy: bool) -> None:
        super().__init__()
        self._single_thread = SingleThread()
        # buffer 1: while `prefetch` batches wait, one more is read
        self._settings = Settings(0, 0, 1, prefetch)
        self._accounts = Accounts(prefetch + 2 if prefetch else 0)
        idle = prefetch + 3  # one being placed, `prefetch` that wait, two in use
        source = self._source = _Batches(iterable, sharding, copy, idle, self._accounts)
        self._prefetcher = run_over(source, source.place, self._settings, Watch(Reading()))
        self._state = source.state()
        self._batches = self._rows = self._placed_bytes = 0
        self._started = self._exhausted = self._closed = False
        weakref.finalize(self, self._prefetcher.close).atexit = False

    def __iter__(self) -> MeshIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch. An error of the user's iterator is raised after all earlier batches."""
        with self._single_thread:
            return self._next()

    def _next(self) -> Any:
        asked = time.perf_counter()
        if self._exhausted:
            raise StopIteration
        if self._closed:
            raise ValueError(_CLOSED)
        self._check_not_forked()
        try:
            if not self._started:
                self._started = True
                close_at_exit(self._prefetcher)
                close_on_abort(self._prefetcher)
                self._prefetcher.start()
            placed = self._prefetcher.take()
            host: _HostBatch = placed.metadata
            self._accounts.delivered(BatchRecord(asked, time.perf_counter(), [host.times], placed.times))
            self._batches += 1
            self._rows += jax.tree.leaves(placed.batch)[0].shape[0]
            self._placed_bytes += host.nbytes
            self._state = host.after
        except Closed:
            raise failure() or ValueError(_CLOSED) from None
        except StallError as error:  # no batch is lost
            error.add_note(_STALLED)
            raise
        except BaseException as error:
            self._closed = True
            # after an interrupt, placed batches are lost, so a StopIteration would wrongly mean the end
            self._exhausted = isinstance(error, Exception)
            self._prefetcher.close()
            raise
        return placed.batch

    def statistics(self) -> Statistics:
        """Return an immutable snapshot of the counts and times so far.

        `read_s`: time in the user's iterator; `stage_s`: time of copies. Fields that only feeds have: 0 or None.
        """
        return Statistics(
            batches=self._batches,
            rows=self._rows,
            placed_bytes=self._placed_bytes,
            **self._accounts.times(self._accounts.window()),
            ready=self._prefetcher.waiting,
            slabs=self._source.staging.mapped,
            host_bytes=self._source.staging.mapped_bytes,
        )

    def report(self) -> Report:
        """Return a report to print: what limits training, what that costs, and what to change.

        In the report, "reading" is the time in the user's iterator.

        Raises:
          ValueError: too few batches were delivered. Batches that were read before the loop began do not count.
        """
        window = self._accounts.window()
        if window is None:
            raise ValueError(
                "a report needs more batches that were read after the loop began; this iterator has delivered "
                f"{self._batches} in all; call report() after more steps"
            )
        how = Circumstances(
            window,
            self._settings,
            own_cores(),
            stream=True,
            gil_wait_s=self._accounts.gil_wait_s(),
            process=jax.process_index(),
        )
        return judge(how)

    def get_state(self) -> Any:
        """The state of the user's iterator after the last batch delivered. TypeError: it has no `get_state`."""
        if not self._source.stateful:
            raise TypeError(
                "the iterator given to prefetch_to_mesh has no get_state to forward; pass an iterator that has "
                "one, such as Grain's"
            )
        return self._state

    def close(self, timeout_s: float = 30) -> None:
        """Stop the background thread, and close the user's iterator if it has a `close`. Idempotent.

        Args:
          timeout_s: how long to wait for that thread. If it is stuck in the user's iterator, a warning
            is logged, and the thread ends when the process exits.
        """
        if self._is_forked():
            return  # the thread and the iterator belong to the parent process
        self._closed = True
        self._prefetcher.close()
        if stuck := self._prefetcher.join(min(timeout_s, threading.TIMEOUT_MAX)):
            _log.warning("%s is still busy with a read or a transfer %g s after close", stuck, timeout_s)
        else:
            self._source.close()  # a no-op if the thread has closed it

    def __enter__(self) -> MeshIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Batches:
    """Reads the user's iterator: validates, copies and places each batch. Called by the placement thread."""

    def __init__(self, iterable: Iterable[Any], sharding: Any, copy: bool, idle: int, accounts: Accounts) -> None:
        prepare_jax()  # before any thread places: two first batches at once may crash
        self._iterator: Any = iter(iterable)
        self.stateful = hasattr(self._iterator, "get_state")
        self._settings = JaxSettings.of_this_thread()
        self._sharding, self._copy, self._accounts = sharding, copy, accounts
        self._form: tuple[RowSpec, list[bool]] | None = None  # the last spec, and which leaves were copied
        self._placement: tuple[RowSpec, Placement] | None = None  # for batches of this spec
        self.staging = Staging([], idle)
        close = getattr(self._iterator, "close", None)
        self._unclosed = [] if close is None else [close]  # whichever thread removes it calls it

    def __next__(self) -> _HostBatch:
        with self._settings.applied():
            watch = Stopwatch()
            batch = next(self._iterator)
            read_s, read_cpu_s = watch.lap()
            arrays = jax.tree_util.tree_map_with_path(_checked, batch)
            spec = RowSpec.of(arrays)
            leaves = self._in_placed_dtypes(jax.tree.leaves(arrays), spec)
            state = self.state()
            stage_s, stage_cpu_s = watch.lap()
        times = PartTimes(this_thread(), watch.began, read_s, 0.0, stage_s, read_cpu_s, stage_cpu_s)
        return _HostBatch(spec, leaves, sum(leaf.nbytes for leaf in leaves), state, times)

    def state(self) -> Any:
        """A copy of the iterator's state; None if it has no `get_state`."""
        return copies.deepcopy(self._iterator.get_state()) if self.stateful else None

    def place(self, given: _HostBatch) -> Placed:
        if self._placement is None or given.spec != self._placement[0]:
            with self._settings.applied():
                spec = sharded_like(given.spec.tree(given.leaves), self._sharding)
                self._placement = given.spec, Placement(spec, given.nbytes)
        placed = self._placement[1].placed(given, self._accounts.placed)
        if self._copy:  # wait for copies: after this, the iterator may reuse the memory of its `jax.Array`s
            pairs = zip(jax.tree.leaves(placed.batch), given.leaves, strict=True)
            jax.block_until_ready([array for array, leaf in pairs if isinstance(leaf, jax.Array)])
        return placed

    def close(self) -> None:
        self.staging.close()
        try:
            close = self._unclosed.pop()
        except IndexError:  # already closed, or without a `close`
            return
        close()

    def _in_placed_dtypes(self, given: list[Any], spec: RowSpec) -> list[Any]:
        """Convert leaves to their placed dtypes. Copies them, except leaves on devices and, with `copy=False`,
        leaves that keep their dtype."""
        copied = [
            not isinstance(values, jax.Array) and (self._copy or leaf.dtype != leaf.placed_dtype)
            for values, leaf in zip(given, spec.leaves, strict=True)
        ]
        if (spec, copied) != self._form:  # slabs of the old shapes cannot be used again
            self._form = spec, copied
            shapes = [
                (leaf.shape, leaf.placed_dtype) for leaf, mine in zip(spec.leaves, copied, strict=True) if mine
            ]
            self.staging.change(shapes)
        leased = iter(self.staging.lease())
        leaves = [next(leased) if mine else values for values, mine in zip(given, copied, strict=True)]
        for target, values, leaf in zip(leaves, given, spec.leaves, strict=True):
            if target is not values:
                row = dataclasses.replace(leaf, shape=leaf.shape[1:])
                cast_into(target, values, row, np.arange(len(values)))
        return leaves


def _checked(path: Any, leaf: Any) -> Any:
    """Convert a leaf to a NumPy array, except a `jax.Array` on this process's devices whose dtype JAX keeps."""
    name = f"batch{jax.tree_util.keystr(path)}"
    stays = isinstance(leaf, jax.Array) and not leaf.is_deleted() and leaf.is_fully_addressable
    stays = stays and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)  # typed PRNG keys
    stays = stays and leaf.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype)
    leaf = leaf if stays else as_array(name, leaf)
    if not leaf.shape:
        raise ValueError(
            f"{name}: a leaf needs a first axis that counts rows, got a scalar; give it one value per row"
        )
    return leaf
