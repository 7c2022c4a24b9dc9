"""The memory in which process-local batches are built: page-aligned slabs, reused once nothing refers to them.

A *slab* is leased as a NumPy array whose base is a lease. The array and its slices keep the lease alive. So does
JAX while a transfer reads the array. The CPU backend uses aligned memory without a copy, so its device arrays keep
the lease alive, too. Once the lease is freed, its slab is idle and can be leased again. So no code has to detect
the end of a transfer.

Guarantees:

1. A slab has at most one lease at a time.
2. `lease` never waits: if no slab is idle, it maps a new one.
3. At most `idle` slabs of each leaf are kept idle; any further slab is unmapped at once. So the memory in use is
   the memory of all leased arrays, and of at most `idle` more batches.
4. A lease may end anywhere: in any thread, in the garbage collector, inside `lease`, after `close`, at exit. No
   Python code runs when it ends. So an interrupt at that moment neither gets lost nor loses a slab.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.loader.form import LocalForm
from feedline._src.plan.plan import Form
from feedline._src.rows.spec import Array

Slab = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Staging:
    """Slabs for batches of one form. Any thread may lease.

    A pickled copy has no slabs: a worker process maps its own.

    Args:
      form: shape and dtype of each leaf of a batch.
      idle: the maximum number of idle slabs of each leaf. If it is the number of batches that a steady feed uses
        at a time, no further slabs are mapped.

    Attributes:
      mapped: the number of slabs mapped so far. In a steady feed, it stops growing.

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

    _idle: Sequence[deque[_Return]] = ()  # for `__del__` after an interrupt in `__init__`

    def __init__(self, form: Sequence[Form], idle: int) -> None:
        self._form = list(form)
        self.most_idle = idle
        self._idle = self._new_idle()
        self.mapped = 0
        # A counter needs no lock; `mapped += 1` would need one, which an interrupt could leave held
        self._numbers = itertools.count(1)
        self._mapped: set[weakref.ref[mmap.mmap]] = set()  # the slabs that are mapped now

    @property
    def mapped_bytes(self) -> int:
        slabs = (slab() for slab in self._mapped.copy())
        return sum(len(slab) for slab in slabs if slab is not None)

    def lease(self) -> list[Array]:
        """Return an uninitialised, page-aligned array for each leaf."""
        return [self._lease(*leaf, idle) for leaf, idle in zip(self._form, self._idle, strict=True)]

    def keep(self, idle: int) -> None:
        """Change `idle`, and unmap the slabs that are idle now."""
        self.most_idle = idle
        self.close()

    def change(self, form: Sequence[Form]) -> None:
        """Change `form`, and unmap the slabs that are idle now."""
        self._form = list(form)
        self.close()

    def close(self) -> None:
        """Unmap the idle slabs; leased slabs are unmapped when their leases end. Idempotent."""
        retired, self._idle = self._idle, self._new_idle()
        self._retire(retired)

    def __del__(self) -> None:
        self._retire(self._idle)

    @staticmethod
    def _retire(idle: Sequence[deque[_Return]]) -> None:
        """Unmap idle slabs. A lease that ends later appends its slab to these deques, which then discard it."""
        for of_leaf in idle:
            type(of_leaf).__init__(of_leaf, maxlen=0)  # not `deque`, because this global may be gone at exit

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
        try:
            memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE)  # so batches in a forked child do not change
        except OSError as error:
            raise FeedError(
                f"the memory of a batch must fit beside what this process uses, and {size:,} bytes for one of its "
                f"leaves are not available ({error.strerror}); use a smaller batch_size, Reading.buffer or "
                "prefetch, or raise the limit (ulimit -v)",
                stage="read",
            ) from error
        self.mapped = next(self._numbers)
        self._mapped.add(weakref.ref(memory, self._mapped.discard))
        with contextlib.suppress(AttributeError, OSError):  # not on all systems
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults in new memory, and fewer TLB misses later
        return np.frombuffer(memory, np.uint8)

    def _new_idle(self) -> list[deque[_Return]]:
        # one deque per leaf; a full deque drops its oldest entry when another one is appended (guarantee 3)
        return [deque(maxlen=self.most_idle) for _ in self._form]

    def __reduce__(self) -> Any:
        return Staging, (self._form, self.most_idle)


class _Lease:
    __slots__ = ("__array_interface__", "__weakref__", "back")
    __array_interface__: dict[str, Any]
    back: _Return


class _Return(weakref.ref[_Lease]):
    """A weak reference to a lease, kept alive by the lease. When the lease ends, `slab` becomes idle."""

    __slots__ = ("slab",)
    slab: Slab

    @classmethod
    def of(cls, slab: Slab, lease: _Lease, idle: deque[_Return]) -> _Return:
        """Create it in a frame of its own: if interrupted before it has a slab, it is freed before its lease."""
        back = cls(lease, idle.append)
        back.slab = slab
        return back


class Buffers(NamedTuple):
    """The memory of one process-local batch.

    Attributes:
      read: the leaves as the source writes them, in its dtypes and with the shapes of `ProcessReads.as_read`.
      leaves: the leaves as they are placed. A leaf that is not transformed, cast or cut is the same array in both.
    """

    read: list[Array]
    leaves: list[Array]

    def of_step(self, step: int) -> Buffers:
        """The memory of batch `step`, if this is the memory of a delivery of several batches."""
        placed = {id(whole): whole[step] for whole in self.leaves}
        read = [placed.get(id(whole), whole[step]) for whole in self.read]
        return Buffers(read, list(placed.values()))


class BatchBuffers:
    """Leases `Buffers` for batches of one form. Any thread may lease.

    Args:
      idle: as for `Staging`.
      steps: the batches in a delivery; if more than 1, the leaves have an additional first axis of this length.
    """

    def __init__(self, form: LocalForm, idle: int, steps: int = 1) -> None:
        several = () if steps == 1 else (steps,)
        placed = [
            ((*several, *plan.local_shape), leaf.placed_dtype)
            for plan, leaf in zip(form.part.of_rows, form.out.leaves, strict=True)
        ]
        read = [((*several, *shape), dtype) for shape, dtype in form.part.as_read]
        changed = form.part.changed  # all other leaves are read into the memory from which they are placed
        self._read_at = [len(placed) + changed.index(i) if i in changed else i for i in range(len(read))]
        self._placed = len(placed)
        self._ragged = {*form.ragged, *(self._read_at[i] for i in form.ragged)}
        self.staging = Staging(placed + [read[i] for i in changed], idle)

    def lease(self, length: int | None = None) -> Buffers:
        """Lease uninitialised memory for a delivery.

        Args:
          length: the length of axis 1 of the ragged leaves.
        """
        leased = self.staging.lease()
        if length is not None:
            for at in self._ragged:
                leased[at] = shortened(leased[at], length)
        return Buffers([leased[at] for at in self._read_at], leased[: self._placed])


def shortened(array: Array, length: int) -> Array:
    """Return a contiguous array over the start of the memory of `array`, with `length` elements along axis 1."""
    shape = (len(array), length, *array.shape[2:])
    return array.reshape(-1)[: math.prod(shape)].reshape(shape)
