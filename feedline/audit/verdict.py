"""One layout against the run on one device. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline.audit.digest import Digests
from feedline.audit.held import Difference, Held, Refused, whole
from feedline.audit.layouts import Layout
from feedline.audit.places import Place, places, starts

_HINT = "; the feed has a transform: row i of its result must depend on row i alone, and on rows.key"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is to be said of one layout.

    Attributes:
      refused: why it could not be run with this feed.
      batches, rows: that were compared.
      digest: of those rows, in the order of the run.
      on_one_device: of the same places of the run on one device. Equal, unless there is a difference.
      difference: the first.
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
    """The run on one device: its rows, and where they stand in it."""

    held: Held
    digests: Digests
    """uint64[batches, batch_size, leaves]."""

    @classmethod
    def of(cls, processes: Sequence[Held | Refused]) -> Reference:
        """From what the one process of the first layout held. Nothing in that layout can be refused."""
        (held,) = processes
        assert isinstance(held, Held)
        return cls(held, whole([held]))

    @property
    def different_rows(self) -> int:
        """How many of its rows can be told apart. Others might be swapped without anyone noticing, or caring."""
        return len(np.unique(self.digests.reshape(-1, self.digests.shape[2]), axis=0))

    def start_of(self, batch: int) -> Place:
        """(epoch, position) of a batch's first row."""
        return next(place for k, place in enumerate(starts(self.held.settings)) if k == batch)

    def find(
        self, epoch: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], Digests]:
        """Which of these places it reached, bool[k]; and the digests of the rows there, uint64[those, leaves]."""
        own_epoch, own_position = places(self.held.settings, (0, 0), len(self.digests))
        stride = 1 + max(int(own_position.max()), int(position.max()))
        own = (own_epoch * stride + own_position).ravel()
        asked = epoch * stride + position
        order = np.argsort(own)
        at = order[np.minimum(np.searchsorted(own, asked, sorter=order), len(own) - 1)]
        known = own[at] == asked
        return known, self.digests.reshape(len(own), -1)[at[known]]

    def tell(self, row: Digests) -> str:
        """Where else it holds a row with these digests, or why it may hold none."""
        found = np.argwhere((self.digests == row).all(axis=2))
        if len(found):
            return f"; one device holds that row at batch {found[0][0]}, row {found[0][1]}"
        return _HINT if self.held.settings.transformed else ""


def judged(layout: Layout, processes: Sequence[Held | Refused], reference: Reference) -> Verdict:
    """The verdict on what the processes of one layout held."""
    one = processes[0]
    if isinstance(one, Refused):
        return Verdict(layout, refused=one.why)
    held = [process for process in processes if isinstance(process, Held)]
    verdict = Verdict(layout, batch_size=one.settings.batch_size, batches=len(one.batches), seconds=one.seconds)
    if isinstance(one.census, Difference):
        return dataclasses.replace(verdict, difference=one.census)
    try:
        _check_form(layout, one, reference.held)
        return _compared(verdict, one, whole(held), reference)
    except Difference as difference:
        return dataclasses.replace(verdict, difference=difference)


def _check_form(layout: Layout, held: Held, alone: Held) -> None:
    """Whether rows can be compared one by one at all."""
    expected = alone.settings._replace(batch_size=alone.settings.batch_size * layout.times)
    if held.settings != expected:
        names = [name for name in expected._fields if getattr(held.settings, name) != getattr(expected, name)]
        told = ", ".join(f"{name} {getattr(held.settings, name)}" for name in names)
        meant = ", ".join(f"{name} {getattr(expected, name)}" for name in names)
        raise Difference(
            f"the feed has {told}, on one device {meant}; make_feed must not take it from the mesh or its process"
        )
    if (held.names, held.forms) != (alone.names, alone.forms):
        raise Difference(f"the batch has the leaves {held.names}, on one device {alone.names}, or other shapes")


def _compared(verdict: Verdict, held: Held, digests: Digests, reference: Reference) -> Verdict:
    first = reference.start_of(held.taken)
    epoch, position = (part.ravel() for part in places(held.settings, first, len(digests)))
    known, expected = reference.find(epoch, position)
    if not known.any():
        return dataclasses.replace(verdict, refused="it met no row that one device met; --batches compares more")
    found = digests.reshape(len(epoch), -1)[known]
    difference = _of_states(held, reference.held)
    wrong = np.argwhere(found != expected)
    if len(wrong):
        row, leaf = wrong[0]
        at = int(np.flatnonzero(known)[row])
        batch, in_batch = divmod(at, held.settings.batch_size)
        difference = Difference(
            f"at epoch {epoch[at]}, position {position[at]} is another row than on one device"
            f"{reference.tell(found[row])}",
            batch=held.taken + batch if verdict.layout.times == 1 else batch,
            row=in_batch,
            leaf=held.names[leaf],
        )
    return dataclasses.replace(
        verdict,
        rows=int(known.sum()),
        digest=_short(found),
        on_one_device=_short(expected),
        difference=difference,
    )


def _of_states(held: Held, alone: Held) -> Difference | None:
    """Where the feed tells another state than on one device."""
    if held.settings != alone.settings:
        return None
    for batch, state in enumerate(held.states, held.taken):
        if state != alone.states[batch]:
            return Difference(f"its state is {state}, on one device {alone.states[batch]}", batch=batch)
    return None


def _short(digests: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(digests).astype("<u8").tobytes()).hexdigest()[:12]
