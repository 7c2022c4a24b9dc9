"""Combines what the processes of a layout observed, and compares it with what one device observed. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.order.schedule import Remainder
from feedline._src.tools.audit.digest import Digests
from feedline._src.tools.audit.layouts import AXES, Layout

State = dict[str, Any]
EpochPosition = tuple[int, int]
_TRANSFORM_RULE = "; the feed has a transform: row i of its result must depend on row i alone, and on rows.key"


class Difference(Exception):
    """The first difference between a layout and what it must be.

    Attributes:
      where: numbers of the "batch" and of the "row" in it, and the name of the "leaf", as far as they are known.
    """

    def __init__(
        self, found: str, batch: int | None = None, row: int | None = None, leaf: str | None = None
    ) -> None:
        super().__init__(found)
        self.where = {"batch": batch, "row": row, "leaf": leaf}


class Settings(NamedTuple):
    """Options with which the feed was built. `rows` is None for a stream."""

    rows: int | None
    batch_size: int
    remainder: Remainder
    epochs: int | None
    transformed: bool


class Coverage(NamedTuple):
    """What the row indices of whole epochs, and the source, say about the rows on one device.

    Attributes:
      epochs: how many epochs were counted; of a mixture, those of its sources.
      left_out: rows that each epoch leaves out.
      compared: delivered rows that had the values of the source.
      shown, not_shown: sentences for the report.
    """

    epochs: int = 0
    left_out: int | None = None
    compared: int = 0
    shown: tuple[str, ...] = ()
    not_shown: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Observed:
    """What one process observed in one layout.

    Attributes:
      leaves: dtype and shape of a row of each leaf, by the leaf's name.
      digests: [batch][leaf], what `shard_digests` returns.
      shapes: [batch][leaf], of a row; that of a ragged leaf differs between batches.
      states: step, epoch and position of the feed's state after each batch.
      first_batch: number of the first batch, counted in batches of the feed's own size; 0 unless it was resumed.
      coverage: in the layout with which all others are compared, or how the feed differs from its source.
    """

    settings: Settings
    leaves: dict[str, str]
    digests: list[list[dict[int, Digests]]]
    shapes: list[list[tuple[int, ...]]]
    states: list[State]
    first_batch: int = 0
    seconds: float = 0.0
    coverage: Coverage | Difference | None = None


class NotRun(NamedTuple):
    """Why a process did not run a layout: the audit cannot ask this feed for it, or the process failed."""

    reason: str
    failed: bool


class Reference:
    """What one device observed, with which all other layouts are compared.

    Attributes:
      digests: uint64[batch, row, leaf].
    """

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.digests = global_digests([observed])

    @property
    def different_rows(self) -> int:
        """How many different rows there are. A swap of two equal rows cannot be found."""
        return len(np.unique(self.digests.reshape(-1, self.digests.shape[2]), axis=0))

    def find(
        self, epoch: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], Digests]:
        """Look up the rows at k epochs and positions.

        Returns:
          bool[k], whether one device delivered the row; and the digests of those rows, uint64[delivered, leaves].
        """
        own_epoch, own_position = row_positions(self.observed.settings, (0, 0), len(self.digests))
        stride = 1 + max(int(own_position.max()), int(position.max()))
        own = (own_epoch * stride + own_position).ravel()  # ascending
        wanted = epoch * stride + position
        at = np.minimum(np.searchsorted(own, wanted), len(own) - 1)
        known = own[at] == wanted
        return known, self.digests.reshape(len(own), -1)[at[known]]

    def hint(self, row: Digests) -> str:
        """For the message about a wrong row: where one device delivered it, or what a transform must do."""
        found = np.argwhere((self.digests == row).all(axis=2))
        if len(found):
            return f"; one device holds that row at batch {found[0][0]}, row {found[0][1]}"
        return _TRANSFORM_RULE if self.observed.settings.transformed else ""


def batch_starts(settings: Settings, after: EpochPosition = (0, 0)) -> Iterator[EpochPosition]:
    """(epoch, position) of the first row of each batch, where the first batch starts at `after` or later.

    Computed without feedline's schedule, which the audit checks.

    Example:
      >>> ten = Settings(rows=10, batch_size=4, remainder="drop", epochs=None, transformed=False)
      >>> list(itertools.islice(batch_starts(ten), 3))
      [(0, 0), (0, 4), (1, 0)]
    """
    rows, size, (epoch, position) = settings.rows, settings.batch_size, after
    while rows is None:  # a stream: the length of its epochs is unknown
        yield epoch, position
        position += size
    while True:
        if settings.remainder == "wrap":
            epoch, position = epoch + position // rows, position % rows
            if settings.epochs and (settings.epochs - epoch % settings.epochs) * rows - position < size:
                epoch, position = (epoch // settings.epochs + 1) * settings.epochs, 0
        elif position + (size if settings.remainder == "drop" else 1) > rows:
            epoch, position = epoch + 1, 0
        yield epoch, position
        position += size


def row_positions(
    settings: Settings, first: EpochPosition, batches: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Epoch and position of each row, each int64[batches, batch_size]. Padded rows have a position ≥ rows."""
    begin = np.array(list(itertools.islice(batch_starts(settings, first), batches))).reshape(batches, 2, 1)
    position = begin[:, 1] + np.arange(settings.batch_size)
    epoch = np.broadcast_to(begin[:, 0], position.shape)
    if settings.remainder == "wrap" and settings.rows is not None:
        return epoch + position // settings.rows, position % settings.rows
    return epoch, position


def global_digests(processes: Sequence[Observed]) -> Digests:
    """uint64[batch, row, leaf]: the digest of each row of each global batch.

    Raises:
      Difference: two devices hold different values of a row, or the processes disagree on the feed's options or
        states.
    """
    one = processes[0]
    for process, other in enumerate(processes):
        if (other.settings, other.leaves, other.states) != (one.settings, one.leaves, one.states):
            raise Difference(f"process {process} and process 0 disagree on the feed's options or states")
    digests = np.empty((len(one.digests), one.settings.batch_size, len(one.leaves)), np.uint64)
    for batch, leaf in np.ndindex(len(one.digests), len(one.leaves)):
        replicas: dict[int, Digests] = {}
        for other in processes:
            for number, part in other.digests[batch][leaf].items():
                replicas[number] = replicas[number] + part if number in replicas else part
        digests[batch, :, leaf] = first = replicas.pop(0)
        for replica in replicas.values():
            if (wrong := replica != first).any():
                raise Difference(
                    "two devices hold different values of the same part of it",
                    batch=one.first_batch + batch,
                    row=int(wrong.argmax()),
                    leaf=list(one.leaves)[leaf],
                )
    return digests


def judge(layout: Layout, processes: Sequence[Observed | NotRun], reference: Reference) -> dict[str, Any]:
    """Compare what all processes of a layout observed with one device.

    Returns:
      JSON values: the layout, what was compared, "same", and the reason if that is False ("difference", the first
      one) or None ("not_run").
    """
    found = {
        "title": layout.title,
        "name": layout.name,
        "processes": layout.processes,
        "devices": layout.devices,
        "mesh": dict(zip(AXES, layout.mesh, strict=True)),
        "batch_size": 0,
        "batches": 0,
        "rows": 0,
        "digest": "",
        "on_one_device": "",
        "same": None,
        "not_run": "",
        "difference": None,
        "seconds": 0.0,
    }
    observed = [process for process in processes if isinstance(process, Observed)]
    if len(observed) < len(processes):
        return found | {"not_run": next(one.reason for one in processes if isinstance(one, NotRun))}
    one = observed[0]
    found |= {"batch_size": one.settings.batch_size, "batches": len(one.digests), "seconds": round(one.seconds, 3)}
    try:
        if isinstance(one.coverage, Difference):
            raise one.coverage
        _check_comparable(layout, one, reference.observed)
        first = next(itertools.islice(batch_starts(reference.observed.settings), one.first_batch, None))
        digests = global_digests(observed)
        epoch, position = (part.ravel() for part in row_positions(one.settings, first, len(digests)))
        known, expected = reference.find(epoch, position)
        if not known.any():
            return found | {"not_run": "it met no row that one device met; --batches compares more"}
        rows = digests.reshape(len(epoch), -1)[known]
        found |= {"rows": int(known.sum()), "digest": _short(rows), "on_one_device": _short(expected)}
        wrong = np.argwhere(rows != expected)
        if len(wrong):
            at = int(np.flatnonzero(known)[wrong[0][0]])
            batch, row = divmod(at, one.settings.batch_size)
            raise Difference(
                f"at epoch {epoch[at]}, position {position[at]} is another row than on one device"
                f"{reference.hint(rows[wrong[0][0]])}",
                batch=batch + (one.first_batch if layout.times == 1 else 0),
                row=row,
                leaf=list(one.leaves)[wrong[0][1]],
            )
        _check_states(one, reference.observed)
    except Difference as difference:
        return found | {"same": False, "difference": {**difference.where, "found": str(difference)}}
    return found | {"same": True}


def _check_comparable(layout: Layout, observed: Observed, one_device: Observed) -> None:
    """Check that options and leaves are the same, so that rows can be compared one by one."""
    expected = one_device.settings._replace(batch_size=one_device.settings.batch_size * layout.times)
    if observed.settings != expected:
        raise Difference(
            f"the feed has {observed.settings}, on one device {one_device.settings}; make_feed must not take them "
            "from the mesh or the process"
        )
    if observed.leaves != one_device.leaves:
        raise Difference(f"the batch has the leaves {observed.leaves}, on one device {one_device.leaves}")


def _check_states(observed: Observed, one_device: Observed) -> None:
    """Check that the feed has the state of one device after each batch; other batch sizes have other states."""
    if observed.settings != one_device.settings:
        return
    for batch, state in enumerate(observed.states, observed.first_batch):
        if state != one_device.states[batch]:
            raise Difference(f"its state is {state}, on one device {one_device.states[batch]}", batch=batch)


def _short(digests: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(digests).astype("<u8").tobytes()).hexdigest()[:12]
