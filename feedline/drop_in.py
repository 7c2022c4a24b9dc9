"""`prefetch_to_mesh`: places and prefetches the batches of any iterator."""

from __future__ import annotations

import copy as copies
import dataclasses
import logging
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from feedline.agreement.monitor import close_on_abort, failure
from feedline.loader.staging import Staging
from feedline.options import MAX_AHEAD, Reading, checked_integer
from feedline.placement.place import Placement, check_shardings, sharded_like
from feedline.placement.plan import as_shardings
from feedline.prefetch.handover import Closed
from feedline.prefetch.prefetcher import Prefetcher
from feedline.prefetch.synchronous import Synchronous
from feedline.prefetch.watch import Watch
from feedline.rows.spec import Array, RowSpec, cast_into
from feedline.rows.values import as_array
from feedline.runtime.exit import close_at_exit
from feedline.runtime.jax_settings import JaxSettings
from feedline.runtime.process_bound import ProcessBound

_log = logging.getLogger("feedline")
_CLOSED = "the iterator is closed, by close() or by an interrupt; call prefetch_to_mesh again"


def prefetch_to_mesh(
    iterable: Iterable[Any], sharding: Any, prefetch: int = 2, *, copy: bool = True
) -> MeshIterator:
    """Place and prefetch the process-local batches of an iterator. Returns an iterator of global arrays.

    Args:
      iterable: yields trees of NumPy arrays: this process's rows of each global batch, ascending (see
        `feedline.local_rows`), and this process's part of other sharded axes. With one process: whole
        batches. One background thread calls it.
      sharding: of the batch: one `jax.sharding.Sharding` or a tree of them that is a prefix of it. A bare device
        or, under `jax.set_mesh`, a bare `PartitionSpec` stands for its sharding.
      prefetch: how many placed batches may wait; 0: synchronous.
      copy: True copies each batch before it is placed, since many iterators write the next batch into
        the same memory, which JAX may still read (a GPU) or use as the array's own (the CPU backend). False
        skips that copy; then no array may change after the iterator yielded it.

    Returns:
      An iterator with `close()`, and with `get_state()` if `iterable`'s iterator has one: its state
      after the last batch that was *delivered*, not after prefetched ones.

    Raises:
      TypeError, ValueError: on the first `next`, if a batch does not fit the sharding.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
      >>> sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
      >>> batches = ({"x": np.full((8 * jax.device_count(), 2), i, np.float32)} for i in range(3))
      >>> [int(batch["x"][0, 0]) for batch in prefetch_to_mesh(batches, sharding)]
      [0, 1, 2]
    """
    sharding = as_shardings(sharding)
    check_shardings(sharding)
    return MeshIterator(
        iterable, sharding, checked_integer("prefetch", prefetch, at_least=0, at_most=MAX_AHEAD), copy
    )


class _HostBatch(NamedTuple):
    """A batch of the user's iterator, or its copy, and the iterator's state after it."""

    spec: RowSpec
    leaves: list[Any]
    state: Any


class MeshIterator(ProcessBound):
    """The iterator that `prefetch_to_mesh` returns. For one thread at a time; any thread may call `close`."""

    _name = "the iterator of prefetch_to_mesh"
    _instead = "call prefetch_to_mesh again, with an iterator of its own"

    def __init__(self, iterable: Iterable[Any], sharding: Any, prefetch: int, copy: bool) -> None:
        super().__init__()
        settings = JaxSettings.of_this_thread()
        idle = prefetch + 3  # one being placed, `prefetch` that wait, two in use
        source = self._source = _CheckedBatches(iterable, copy, settings, idle)
        place = _BatchPlacement(sharding, settings)
        self._prefetcher: Prefetcher[_HostBatch, tuple[Any, Any]] | Synchronous[_HostBatch, tuple[Any, Any]]
        watch = Watch(Reading())
        self._prefetcher = (
            Prefetcher(source, place, prefetch, watch) if prefetch else Synchronous(source, place, watch)
        )
        self._stateful = hasattr(source.iterator, "get_state")
        self._state = copies.deepcopy(source.iterator.get_state()) if self._stateful else None
        self._started = False
        self._exhausted = False
        self._closed = False
        weakref.finalize(self, self._prefetcher.close).atexit = False

    def __iter__(self) -> MeshIterator:
        return self

    def __next__(self) -> Any:
        """The next batch. StopIteration at the end; an error of the iterator, after the batches before it."""
        if self._exhausted:
            raise StopIteration
        if self._closed:
            raise ValueError(_CLOSED)
        self._check_not_forked()
        if not self._started:
            self._started = True
            close_at_exit(self._prefetcher)
            close_on_abort(self._prefetcher)
            self._prefetcher.start()
        try:
            batch, self._state = self._prefetcher.take()
        except Closed:
            raise failure() or ValueError(_CLOSED) from None
        except BaseException as error:
            # an interrupt loses placed batches, so a StopIteration after it would wrongly mean the end
            self._exhausted = isinstance(error, Exception)
            self._closed = True
            self._prefetcher.close()
            raise
        return batch

    def get_state(self) -> Any:
        """The state of the user's iterator after the last batch delivered."""
        if not self._stateful:
            raise TypeError("the iterator given to prefetch_to_mesh has no get_state, so there is none to forward")
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
        if not self._started:
            self._source.close()  # no thread was started that would close it
        elif stuck := self._prefetcher.join(timeout_s):
            _log.warning("%s is still busy with a read or a transfer %g s after close", stuck, timeout_s)

    def __enter__(self) -> MeshIterator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _CheckedBatches:
    """Reads the user's iterator: validates each batch, and copies it if needed. Called by the placement thread."""

    def __init__(self, iterable: Iterable[Any], copy: bool, settings: JaxSettings, idle: int) -> None:
        self.iterator: Any = iter(iterable)
        self._copy = copy
        self._settings = settings
        self._idle = idle
        self._spec: RowSpec | None = None
        self._staging = Staging([], idle)
        self._closed = False

    def __next__(self) -> _HostBatch:
        with self._settings.applied():
            return self._next()

    def _next(self) -> _HostBatch:
        batch = next(self.iterator)
        arrays = jax.tree_util.tree_map_with_path(
            lambda path, leaf: as_array(f"batch{jax.tree_util.keystr(path)}", leaf), batch
        )
        spec = RowSpec.of(arrays)
        for leaf in spec.leaves:
            if not leaf.shape:
                raise ValueError(
                    f"{leaf.name}: a leaf needs a first axis that counts rows, got a scalar; give each row its own"
                )
        leaves = self._in_placed_dtypes(jax.tree.leaves(arrays), spec)
        state = copies.deepcopy(self.iterator.get_state()) if hasattr(self.iterator, "get_state") else None
        return _HostBatch(spec, leaves, state)

    def close(self) -> None:
        self._staging.close()
        close = getattr(self.iterator, "close", None)
        if close is not None and not self._closed:
            self._closed = True
            close()

    def _in_placed_dtypes(self, given: list[Array], spec: RowSpec) -> list[Array]:
        """The leaves in placed dtypes: copied, except with `copy=False` where the dtype stays the same."""
        copied = [self._copy or leaf.dtype != leaf.placed_dtype for leaf in spec.leaves]
        if spec != self._spec:  # slabs of other shapes cannot be used again
            self._spec = spec
            self._staging.close()
            shapes = [
                (leaf.shape, leaf.placed_dtype) for leaf, mine in zip(spec.leaves, copied, strict=True) if mine
            ]
            self._staging = Staging(shapes, self._idle)
        leased = iter(self._staging.lease())
        leaves = [next(leased) if mine else values for values, mine in zip(given, copied, strict=True)]
        for target, values, leaf in zip(leaves, given, spec.leaves, strict=True):
            if target is not values:
                row = dataclasses.replace(leaf, shape=leaf.shape[1:])
                cast_into(target, values, row, np.arange(len(values)))
        return leaves


class _BatchPlacement:
    """Places batches; makes a new plan only when shapes or dtypes change."""

    def __init__(self, sharding: Any, settings: JaxSettings) -> None:
        self._sharding = sharding
        self._settings = settings
        self._spec: RowSpec | None = None
        self._placement: Placement | None = None

    def __call__(self, given: _HostBatch) -> tuple[Any, Any]:
        if self._placement is None or given.spec != self._spec:
            self._spec = given.spec
            with self._settings.applied():
                self._placement = Placement.of(sharded_like(given.spec.tree(list(given.leaves)), self._sharding))
        return self._placement.place(given.leaves), given.state
