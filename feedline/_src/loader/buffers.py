"""The memory in which process-local batches of one form are built."""

from __future__ import annotations

import math
from typing import NamedTuple

from feedline._src.loader.form import LocalForm
from feedline._src.loader.staging import Staging
from feedline._src.rows.spec import Array


class Buffers(NamedTuple):
    """The memory of one process-local batch.

    Attributes:
      read: the leaves as the source writes them, in its dtypes and with the shapes of `LocalForm.read_shapes`.
      leaves: the leaves as they are placed. Where a leaf needs neither transform nor cast, the array in `read`.
      direct: whether that is so for all leaves.
    """

    read: list[Array]
    leaves: list[Array]
    direct: bool

    def of_step(self, step: int) -> Buffers:
        """Of several batches in one piece of memory, the one with that number."""
        leaves = [leaf[step] for leaf in self.leaves]
        if self.direct:
            return Buffers(leaves, leaves, True)
        placed = {id(whole): leaf for whole, leaf in zip(self.leaves, leaves, strict=True)}
        read = [placed[id(whole)] if id(whole) in placed else whole[step] for whole in self.read]
        return Buffers(read, leaves, False)


class BatchBuffers:
    """Leases `Buffers` in slabs that are used again. Any thread may lease.

    Args:
      form: the form of the batches.
      idle: as for `Staging`.
      steps: of one delivery; with more than 1 the leaves have one more axis in front, of that length.
    """

    def __init__(self, form: LocalForm, idle: int, steps: int = 1) -> None:
        several = () if steps == 1 else (steps,)
        placed = [
            ((*several, *plan.local_shape), leaf.placed_dtype)
            for plan, leaf in zip(form.plans, form.out.leaves, strict=True)
        ]
        read = [
            ((*several, *shape), leaf.dtype)
            for shape, leaf in zip(form.read_shapes(), form.spec.leaves, strict=True)
        ]
        direct = form.transform is None
        self._own = [not (direct and form == placed[i]) for i, form in enumerate(read)]
        self._direct = not any(self._own) and len(read) == len(placed)
        self._placed = len(placed)
        own = [i for i, own in enumerate(self._own) if own]
        self._ragged = [at for at, i in enumerate([*range(len(placed)), *own]) if i in form.ragged]
        self.staging = Staging(placed + [read[i] for i in own], idle)

    def lease(self, length: int | None = None) -> Buffers:
        """Uninitialised memory for a batch, or for all batches of a delivery.

        Args:
          length: of axis 1 of the ragged leaves, at most that in `form`. Their slabs fit any length, so that one
            slab serves all.
        """
        leased = self.staging.lease()
        if length is not None:
            for i in self._ragged:
                leased[i] = _shortened(leased[i], length)
        leaves, temporary = leased[: self._placed], iter(leased[self._placed :])
        if self._direct:
            return Buffers(leaves, leaves, True)
        return Buffers([next(temporary) if own else leaves[i] for i, own in enumerate(self._own)], leaves, False)


def _shortened(array: Array, length: int) -> Array:
    """A contiguous array at the beginning of the memory of `array`, of the same shape but for axis 1."""
    shape = (len(array), length, *array.shape[2:])
    return array.reshape(-1)[: math.prod(shape)].reshape(shape)
