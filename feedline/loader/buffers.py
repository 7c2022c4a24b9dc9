"""The memory in which process-local batches of one form are built."""

from __future__ import annotations

from typing import NamedTuple

from feedline.loader.form import LocalForm
from feedline.loader.staging import Staging
from feedline.rows.spec import Array


class Buffers(NamedTuple):
    """Memory for one process-local batch.

    Attributes:
      read: what the source writes: leaves as `LocalForm.read_shapes` says, in its own dtypes.
      leaves: what is placed. Where nothing is left to do after the read, the same array as in `read`.
    """

    read: list[Array]
    leaves: list[Array]


class BatchBuffers:
    """Gives out `Buffers`, in slabs that are used again. Any thread may ask.

    Args:
      form: of the batches.
      idle: as for `Staging`.
    """

    def __init__(self, form: LocalForm, idle: int) -> None:
        placed = [
            (plan.local_shape, leaf.placed_dtype) for plan, leaf in zip(form.plans, form.out.leaves, strict=True)
        ]
        read = [(shape, leaf.dtype) for shape, leaf in zip(form.read_shapes(), form.spec.leaves, strict=True)]
        direct = form.transform is None
        self._own = [not (direct and form == placed[i]) for i, form in enumerate(read)]
        self._placed = len(placed)
        self.staging = Staging(placed + [form for form, own in zip(read, self._own, strict=True) if own], idle)

    def lease(self) -> Buffers:
        """Memory for the next batch, uninitialised."""
        leased = self.staging.lease()
        leaves, temporary = leased[: self._placed], iter(leased[self._placed :])
        return Buffers([next(temporary) if own else leaves[i] for i, own in enumerate(self._own)], leaves)
