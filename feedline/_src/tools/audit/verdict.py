"""Compares what was observed in one layout with what one device observed. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.tools.audit.digest import Digests
from feedline._src.tools.audit.layouts import Layout
from feedline._src.tools.audit.observed import Difference, Observed, Refused, global_digests
from feedline._src.tools.audit.positions import EpochPosition, batch_starts, row_positions

_HINT = "; the feed has a transform: row i of its result must depend on row i alone, and on rows.key"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of the comparison of one layout.

    Attributes:
      refused: why this feed cannot run in the layout; empty if it can.
      batches, rows: how many were compared.
      digest: of the rows compared, in the order in which they were delivered.
      on_one_device: the digest of the same rows on one device; it is equal unless there is a difference.
      difference: the first difference; None if there is none.
    """

    layout: Layout
    refused: str = ""
    batch_size: int = 0
    batches: int = 0
    rows: int = 0
    digest: str = ""
    on_one_device: str = ""
    seconds: float = 0.0
    difference: Difference | None = None


@dataclasses.dataclass(frozen=True)
class Reference:
    """The layout on one device, with which all others are compared."""

    observed: Observed
    digests: Digests
    """uint64[batches, batch_size, leaves]."""

    @classmethod
    def of(cls, processes: Sequence[Observed | Refused]) -> Reference:
        """From what the only process of the first layout observed; that layout is never refused."""
        (observed,) = processes
        assert isinstance(observed, Observed)
        return cls(observed, global_digests([observed]))

    @property
    def different_rows(self) -> int:
        """How many different rows there are. A swap of two equal rows cannot be found."""
        return len(np.unique(self.digests.reshape(-1, self.digests.shape[2]), axis=0))

    def start_of(self, batch: int) -> EpochPosition:
        """(epoch, position) of a batch's first row."""
        return next(start for k, start in enumerate(batch_starts(self.observed.settings)) if k == batch)

    def find(
        self, epoch: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], Digests]:
        """Look up the rows at k epochs and positions.

        Returns:
          bool[k], whether one device delivered the row; and the digests of those rows, uint64[delivered, leaves].
        """
        own_epoch, own_position = row_positions(self.observed.settings, (0, 0), len(self.digests))
        stride = 1 + max(int(own_position.max()), int(position.max()))
        own = (own_epoch * stride + own_position).ravel()
        asked = epoch * stride + position
        order = np.argsort(own)
        at = order[np.minimum(np.searchsorted(own, asked, sorter=order), len(own) - 1)]
        known = own[at] == asked
        return known, self.digests.reshape(len(own), -1)[at[known]]

    def hint(self, row: Digests) -> str:
        """For the message about a wrong row: where one device delivered it, or what a transform must do."""
        found = np.argwhere((self.digests == row).all(axis=2))
        if len(found):
            return f"; one device holds that row at batch {found[0][0]}, row {found[0][1]}"
        return _HINT if self.observed.settings.transformed else ""


def judge(layout: Layout, processes: Sequence[Observed | Refused], reference: Reference) -> Verdict:
    """The verdict on what the processes of one layout observed."""
    one = processes[0]
    if isinstance(one, Refused):
        return Verdict(layout, refused=one.reason)
    observed = [process for process in processes if isinstance(process, Observed)]
    verdict = Verdict(layout, batch_size=one.settings.batch_size, batches=len(one.batches), seconds=one.seconds)
    if isinstance(one.coverage, Difference):
        return dataclasses.replace(verdict, difference=one.coverage)
    try:
        _check_comparable(layout, one, reference.observed)
        return _compared(verdict, one, global_digests(observed), reference)
    except Difference as difference:
        return dataclasses.replace(verdict, difference=difference)


def _check_comparable(layout: Layout, observed: Observed, one_device: Observed) -> None:
    """Check that options and leaves are the same, so that rows can be compared one by one."""
    expected = one_device.settings._replace(batch_size=one_device.settings.batch_size * layout.times)
    if observed.settings != expected:
        names = [name for name in expected._fields if getattr(observed.settings, name) != getattr(expected, name)]
        here = ", ".join(f"{name} {getattr(observed.settings, name)}" for name in names)
        there = ", ".join(f"{name} {getattr(expected, name)}" for name in names)
        raise Difference(
            f"the feed has {here}, on one device {there}; make_feed must not take it from the mesh or the process"
        )
    if (observed.names, observed.row_specs) != (one_device.names, one_device.row_specs):
        raise Difference(
            f"the batch has the leaves {observed.names}, on one device {one_device.names}, or other shapes"
        )


def _compared(verdict: Verdict, observed: Observed, digests: Digests, reference: Reference) -> Verdict:
    first = reference.start_of(observed.first_batch)
    epoch, position = (part.ravel() for part in row_positions(observed.settings, first, len(digests)))
    known, expected = reference.find(epoch, position)
    if not known.any():
        return dataclasses.replace(verdict, refused="it met no row that one device met; --batches compares more")
    found = digests.reshape(len(epoch), -1)[known]
    difference = _batch_difference(observed, reference.observed)
    wrong = np.argwhere(found != expected)
    if len(wrong):
        row, leaf = wrong[0]
        at = int(np.flatnonzero(known)[row])
        batch, in_batch = divmod(at, observed.settings.batch_size)
        difference = Difference(
            f"at epoch {epoch[at]}, position {position[at]} is another row than on one device"
            f"{reference.hint(found[row])}",
            batch=observed.first_batch + batch if verdict.layout.times == 1 else batch,
            row=in_batch,
            leaf=observed.names[leaf],
        )
    return dataclasses.replace(
        verdict,
        rows=int(known.sum()),
        digest=_short(found),
        on_one_device=_short(expected),
        difference=difference,
    )


def _batch_difference(observed: Observed, one_device: Observed) -> Difference | None:
    """The first batch with another shape than on one device, or after which the feed has another state."""
    if observed.settings != one_device.settings:
        return None
    for batch, (state, leaves) in enumerate(
        zip(observed.states, observed.batches, strict=True), observed.first_batch
    ):
        if state != one_device.states[batch]:
            return Difference(f"its state is {state}, on one device {one_device.states[batch]}", batch=batch)
        for name, shards, expected in zip(observed.names, leaves, one_device.batches[batch], strict=True):
            if (shape := shards[0].shape) != expected[0].shape:
                return Difference(
                    f"its rows have shape {list(shape)}, on one device {list(expected[0].shape)}",
                    batch=batch,
                    leaf=name,
                )
    return None


def _short(digests: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(digests).astype("<u8").tobytes()).hexdigest()[:12]
