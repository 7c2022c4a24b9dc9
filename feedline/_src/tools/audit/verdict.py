"""Combines what the processes of a layout observed, and compares it with the layout "one device". Pure."""

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
Places = npt.NDArray[np.int64]
"""For each row, epoch × `PLACES_PER_EPOCH` + position."""
PLACES_PER_EPOCH = 1 << 40
_ENDLESS = 1 << 62  # stands for the number of rows of a stream, which is unknown


class Difference(Exception):
    """The first difference between a layout and the expected rows. `where`: batch, row, leaf; None: unknown."""

    def __init__(
        self, found: str, batch: int | None = None, row: int | None = None, leaf: str | None = None
    ) -> None:
        super().__init__(found)
        self.where = {"batch": batch, "row": row, "leaf": leaf}


class Settings(NamedTuple):
    """What must be the same in all layouts: options of the feed, and each leaf's dtype and shape in a row.

    `rows` is None for a stream.
    """

    rows: int | None
    batch_size: int
    remainder: Remainder
    epochs: int | None
    transformed: bool
    leaves: dict[str, str]


@dataclasses.dataclass
class Observed:
    """What one process observed in one layout.

    Attributes:
      first_batch: number of the first batch, counted in batches of the feed's own size; 0 unless the feed resumed.
      digests: [batch][leaf], what `shard_digests` returns.
      shapes: [batch][leaf], the shape of a row; for a ragged leaf it differs between batches.
      states: step, epoch and position after each batch.
      covered, not_covered, difference: what `measure_coverage` found in the reference layout.
    """

    settings: Settings
    first_batch: int = 0
    digests: list[list[Digests]] = dataclasses.field(default_factory=list)
    shapes: list[list[tuple[int, ...]]] = dataclasses.field(default_factory=list)
    states: list[State] = dataclasses.field(default_factory=list)
    covered: list[str] = dataclasses.field(default_factory=list)
    not_covered: list[str] = dataclasses.field(default_factory=list)
    difference: Difference | None = None


class NotRun(NamedTuple):
    """The reason why a layout was not run: for this feed it is impossible, or its rows cannot be compared."""

    reason: str


def batch_starts(settings: Settings, after: EpochPosition = (0, 0)) -> Iterator[EpochPosition]:
    """Yield (epoch, position) of the first row of each batch. The first batch starts at `after` or later.

    This does not use feedline's schedule, because the audit checks that schedule.
    """
    rows, size, (epoch, position) = settings.rows or _ENDLESS, settings.batch_size, after
    while True:
        if settings.remainder == "wrap":
            epoch, position = epoch + position // rows, position % rows
            if settings.epochs and (settings.epochs - epoch % settings.epochs) * rows - position < size:
                epoch, position = (epoch // settings.epochs + 1) * settings.epochs, 0
        elif position + (size if settings.remainder == "drop" else 1) > rows:
            epoch, position = epoch + 1, 0
        yield epoch, position
        position += size


def row_places(settings: Settings, first: EpochPosition, batches: int) -> Places:
    """int64[batches, batch_size]: the places of rows in batches from `first` on. Padding: positions ≥ `rows`."""
    starts = itertools.islice(batch_starts(settings, first), batches)
    epoch, position = np.array(list(starts), np.int64).reshape(batches, 2).T[:, :, None]
    position = position + np.arange(settings.batch_size)
    if settings.remainder == "wrap":
        beyond, position = np.divmod(position, settings.rows or _ENDLESS)
        epoch = epoch + beyond
    return epoch * PLACES_PER_EPOCH + position  # type: ignore[no-any-return]


def global_digests(processes: Sequence[Observed]) -> Digests:
    """uint64[batch, row, leaf] of all global batches. Raises `Difference` if processes or replicas disagree."""
    one = processes[0]
    for process, other in enumerate(processes):
        if (other.settings, other.states) != (one.settings, one.states):
            raise Difference(f"process {process} and process 0 disagree on the feed's options or states")
    leaves = list(one.settings.leaves)
    digests = np.empty((len(one.digests), one.settings.batch_size, len(leaves)), np.uint64)
    for batch, leaf in np.ndindex(len(one.digests), len(leaves)):
        replicas = np.array([other.digests[batch][leaf] for other in processes]).sum(axis=0)
        digests[batch, :, leaf] = replicas[0]
        for _, row in np.argwhere(replicas != replicas[0])[:1]:
            found = "two devices hold different values for the same part of this leaf"
            raise Difference(found, one.first_batch + batch, int(row), leaves[leaf])
    return digests


def judge(layout: Layout, processes: Sequence[Observed | NotRun], one_device: Observed) -> dict[str, Any]:
    """Compare what all processes of a layout observed with what was observed on one device.

    Returns:
      JSON values: the layout, what was compared, and "same". If "same" is False, "difference" has the first
      difference; if it is None, "not_run" has the reason.
    """
    found = {
        "title": layout.title,
        "name": layout.name,
        "processes": layout.processes,
        "mesh": dict(zip(AXES, layout.mesh.shape, strict=True)),
        "batch_size": 0,
        "batches": 0,
        "rows": 0,
        "digest": "",
        "same": None,
        "not_run": next((process.reason for process in processes if isinstance(process, NotRun)), ""),
        "difference": None,
    }
    if found["not_run"]:
        return found
    observed = [process for process in processes if isinstance(process, Observed)]
    found |= {"batch_size": observed[0].settings.batch_size, "batches": len(observed[0].digests)}
    try:
        _check_comparable(layout, observed[0], one_device)
        found |= _compared(observed[0], global_digests(observed), one_device, global_digests([one_device]))
    except Difference as difference:
        return found | {"same": False, "difference": {**difference.where, "found": str(difference)}}
    return found


def _compared(one: Observed, digests: Digests, one_device: Observed, reference: Digests) -> dict[str, Any]:
    """Compare rows and states, and return what `judge` adds. Raises `Difference` if a row or a state differs."""
    size, settings = one.settings.batch_size, one_device.settings
    first = next(itertools.islice(batch_starts(settings), one.first_batch, None))
    places = row_places(one.settings, first, len(digests)).ravel()
    own = row_places(settings, (0, 0), len(reference))
    _, at_one, known = np.intersect1d(own, places, assume_unique=True, return_indices=True)
    if not len(known):
        return {"not_run": "it delivered no row that one device delivered; raise --batches to compare more"}
    expected, rows = reference.reshape(own.size, -1)[at_one], digests.reshape(len(places), -1)[known]
    for wrong, leaf in np.argwhere(rows != expected)[:1]:
        at = int(known[wrong])
        epoch, position = divmod(int(places[at]), PLACES_PER_EPOCH)
        raise Difference(
            f"the row at epoch {epoch}, position {position} differs from the row on one device"
            f"{_hint(rows[wrong], reference, settings)}",
            batch=at // size + (one.first_batch if size == settings.batch_size else 0),
            row=at % size,
            leaf=list(settings.leaves)[leaf],
        )
    for batch, state in enumerate(one.states, one.first_batch):  # states depend on the batch size
        if size == settings.batch_size and state != one_device.states[batch]:
            raise Difference(f"its state is {state}, but on one device {one_device.states[batch]}", batch=batch)
    digest = hashlib.sha256(np.ascontiguousarray(rows).astype("<u8").tobytes()).hexdigest()[:12]
    return {"rows": len(known), "digest": digest, "same": True}


def _hint(row: Digests, reference: Digests, settings: Settings) -> str:
    """Text that ends the message about a wrong row: where one device delivered it, or what a transform must do."""
    for batch, at in np.argwhere((reference == row).all(axis=2))[:1]:
        return f"; one device holds that row at batch {batch}, row {at}"
    if not settings.transformed:
        return ""
    return "; the feed has a transform: row i of its result must depend on row i alone (and on rows.key)"


def _check_comparable(layout: Layout, observed: Observed, one_device: Observed) -> None:
    """Raise the `Difference` that `measure_coverage` found, if any; else a new one if options or leaves differ."""
    if observed.difference is not None:
        raise observed.difference
    expected = one_device.settings._replace(batch_size=one_device.settings.batch_size * layout.times)
    if observed.settings != expected:
        raise Difference(
            f"the feed has {observed.settings}, but on one device {one_device.settings}; in make_feed, do not let "
            "these values depend on the mesh or the process"
        )


def summary(layouts: Sequence[dict[str, Any]], one_device: Observed) -> dict[str, Any]:
    """The object that --json prints, except for "seconds", from what `judge` returned for each layout."""
    settings, digests = one_device.settings, global_digests([one_device])
    differences = [
        {"layout": layout["title"]} | layout["difference"] for layout in layouts if layout["difference"]
    ]
    ran = [layout for layout in layouts if layout["same"] is not None]
    different = len(np.unique(digests.reshape(-1, digests.shape[2]), axis=0))
    batches, rows = (sum(layout[name] for layout in ran) for name in ("batches", "rows"))
    compared = (
        f"{rows:,} rows in {batches:,} batches of {len(ran)} layouts were compared on all devices that hold them; "
        f"the rows of the layout 'one device' include {different:,} distinct ones."
    )
    not_covered = [f"{layout['title']}: {layout['not_run']}" for layout in layouts if layout["not_run"]]
    first_rows = len(digests) * settings.batch_size
    if settings.rows is not None and first_rows < settings.rows:
        not_covered.append(
            f"the values of an epoch's rows after the first {first_rows:,}, and the epoch's end (at most the "
            "indices of these rows were counted; raise --batches to compare more)"
        )
    if settings.transformed:
        not_covered.append(
            "whether the transform is right, since rows were compared with each other, not with the source"
        )
    others = "devices other than this machine's CPU, and other machines"
    return {
        "ok": not differences,
        "difference": differences[0] if differences else None,
        **settings._asdict(),
        "layouts": list(layouts),
        "rows_compared": rows,
        "different_rows": different,
        "covered": [compared, *one_device.covered],
        "not_covered": [*not_covered, *one_device.not_covered, others],
    }
