"""Host buffers that are used again: page-aligned slabs, returned by ownership.

A *slab* is a piece of memory. It is leased as a NumPy array whose base is a lease. Whoever holds that array or
a slice of it keeps the lease alive, and so does JAX: for as long as a transfer reads the array, or a device
array of the CPU backend, which adopts aligned memory, lies in it. When the lease dies, its slab is idle, and
the next lease takes it. Nobody has to know, or guess, when a transfer is over.

Guarantees:

1. A slab is never leased twice at a time.
2. `lease` never waits: where no slab is idle it maps a new one.
3. No more than `idle` slabs of each leaf lie idle; the others are unmapped at once. So the bytes held are those of
   the leased arrays that are alive, and of at most `idle` batches.
4. A lease may end anywhere: in any thread, in the garbage collector, inside `lease`, after `close`, at exit.
"""

from __future__ import annotations

import math
import mmap
import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from feedline.loader.spec import Array

Slab = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Staging:
    """Slabs for batches of one form. Any thread may lease.

    Pickled, it arrives empty: a worker process has slabs of its own.

    Args:
      form: shape and dtype of each leaf of a batch.
      idle: batches whose slabs are kept while nobody uses them. As many as are in use at a time in a steady
        run, then none is ever mapped twice.

    Example:
      >>> staging = Staging([((2, 3), np.dtype(np.float32))], idle=1)
      >>> first = staging.lease()[0]
      >>> address = first.ctypes.data
      >>> part = first[1:]
      >>> del first  # `part` still lies in the slab
      >>> staging.lease()[0].ctypes.data == address
      False
      >>> del part
      >>> staging.lease()[0].ctypes.data == address
      True
    """

    def __init__(self, form: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], idle: int) -> None:
        self._form = list(form)
        self._most_idle = idle
        self._closed = False
        # Of each leaf: idle slabs, and a permit for each further one that may lie idle; together never more
        # than `idle` (guarantee 3). SimpleQueue, because its put may interrupt itself (guarantee 4).
        self._idle: list[queue.SimpleQueue[Slab]] = [queue.SimpleQueue() for _ in self._form]
        self._room: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in self._form]
        for room in self._room:
            for _ in range(idle):
                room.put(None)
        self._mapping = threading.Lock()
        self.mapped = 0
        """Slabs mapped so far. In a steady run it stops growing. Changed under _mapping."""

    def lease(self) -> list[Array]:
        """An uninitialised array for each leaf, which starts on a page border."""
        return [self._lease(leaf) for leaf in range(len(self._form))]

    def close(self) -> None:
        """Unmap the idle slabs, and from now on each slab when its lease ends. Idempotent."""
        self._closed = True
        for room, idle in zip(self._room, self._idle, strict=True):
            _drain(room)
            _drain(idle)

    def _lease(self, leaf: int) -> Array:
        shape, dtype = self._form[leaf]
        size = math.prod(shape) * dtype.itemsize
        try:
            slab = self._idle[leaf].get_nowait()
            self._room[leaf].put(None)
        except queue.Empty:
            slab = self._map(size)
        lease = _Lease()
        lease.__array_interface__ = slab.__array_interface__  # how np.asarray finds the memory
        weakref.finalize(lease, self._give_back, leaf, slab).atexit = False
        return np.asarray(lease)[:size].view(dtype).reshape(shape)

    def _map(self, size: int) -> Slab:
        with self._mapping:
            self.mapped += 1
        memory = mmap.mmap(-1, max(size, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: fewer faults while it is new, fewer TLB misses later
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)

    def _give_back(self, leaf: int, slab: Slab) -> None:
        """The lease of a slab has ended. Called from anywhere; takes no lock."""
        try:
            self._room[leaf].get_nowait()
        except queue.Empty:
            return  # unmapped with its last reference: this one
        self._idle[leaf].put(slab)
        if self._closed:  # perhaps after close had emptied the queue
            _drain(self._idle[leaf])

    def __reduce__(self) -> Any:
        return Staging, (self._form, self._most_idle)


class _Lease:
    """The base of an array that lies in a slab."""

    __slots__ = ("__array_interface__", "__weakref__")


def _drain(waiting: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            waiting.get_nowait()
        except queue.Empty:
            return
