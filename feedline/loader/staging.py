"""Host buffers that are used again: page-aligned slabs, returned by ownership.

A *slab* is a piece of memory. It is leased as a NumPy array whose base is a lease. Whoever holds that array or
a slice of it keeps the lease alive, and so does JAX: for as long as a transfer reads the array, or a device
array of the CPU backend, which adopts aligned memory, lies in it. When the lease dies its slab is idle, and
the next lease takes it. Nobody has to know, or guess, when a transfer is over.

Guarantees:

1. A slab is never leased twice at a time.
2. `lease` never waits: where no slab is idle it maps a new one.
3. No more than `idle` slabs of each leaf lie idle; one more is unmapped at once. So the bytes held are those of
   the leased arrays that are alive, and of at most `idle` batches.
4. A lease may end anywhere: in any thread, in the garbage collector, inside `lease`, after `close`, at exit. No
   Python code runs then, so an interrupt cannot be lost there, nor a slab.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from feedline.rows.spec import Array

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
        self._idle = self._new_idle()
        # Sizes of the slabs mapped so far. A number would need a lock, and an interrupt may leave that held
        self._mapped: list[int] = []

    @property
    def mapped(self) -> int:
        """Slabs mapped so far. In a steady run it stops growing."""
        return len(self._mapped)

    def lease(self) -> list[Array]:
        """An uninitialised array for each leaf, which starts on a page border."""
        return [self._lease(*leaf, idle) for leaf, idle in zip(self._form, self._idle, strict=True)]

    def close(self) -> None:
        """Unmap the idle slabs. Those that are leased follow, with the last of their leases. Idempotent."""
        self._idle = self._new_idle()

    def _lease(self, shape: tuple[int, ...], dtype: np.dtype[Any], idle: deque[_Return]) -> Array:
        size = math.prod(shape) * dtype.itemsize
        try:
            slab = idle.pop().slab
        except IndexError:
            slab = self._map(size)
        lease = _Lease()
        lease.back = _Return.of(slab, lease, idle)
        lease.__array_interface__ = slab.__array_interface__  # how np.asarray finds the memory
        return np.asarray(lease)[:size].view(dtype).reshape(shape)

    def _map(self, size: int) -> Slab:
        self._mapped.append(size)
        memory = mmap.mmap(-1, max(size, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: fewer faults while it is new, fewer TLB misses later
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)

    def _new_idle(self) -> list[deque[_Return]]:
        # of each leaf; a full deque drops the oldest entry when one is appended (guarantee 3)
        return [deque(maxlen=self._most_idle) for _ in self._form]

    def __reduce__(self) -> Any:
        return Staging, (self._form, self._most_idle)


class _Lease:
    """The base of an array that lies in a slab."""

    __slots__ = ("__array_interface__", "__weakref__", "back")
    __array_interface__: dict[str, Any]
    back: _Return


class _Return(weakref.ref[_Lease]):
    """Puts itself, with the slab, among the idle ones when its lease ends. The lease keeps it until then."""

    __slots__ = ("slab",)
    slab: Slab

    @classmethod
    def of(cls, slab: Slab, lease: _Lease, idle: deque[_Return]) -> _Return:
        """Not set up in the caller's frame: an interrupt there could end a lease whose return has no slab yet."""
        back = cls(lease, idle.append)
        back.slab = slab
        return back
