"""Shows the verdicts of an audit as a table, and returns them as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from feedline._src.tools.audit.observed import Coverage
from feedline._src.tools.audit.verdict import Reference, Verdict


def as_object(verdicts: Sequence[Verdict], reference: Reference, seconds: float) -> dict[str, Any]:
    """What --json prints: JSON values."""
    difference = first_difference(verdicts)
    one_device = reference.observed
    coverage = one_device.coverage if isinstance(one_device.coverage, Coverage) else None
    return {
        "ok": difference is None,
        "difference": difference,
        **one_device.settings._asdict(),
        "layouts": [_layout(verdict) for verdict in verdicts],
        "batches_compared": sum(verdict.batches for verdict in verdicts),
        "rows_compared": sum(verdict.rows for verdict in verdicts),
        "different_rows": reference.different_rows,
        "epochs_counted": coverage.epochs + coverage.source_epochs if coverage else 0,
        "left_out_of_each_epoch": coverage.left_out if coverage else None,
        "rows_compared_with_source": coverage.compared if coverage else 0,
        "not_covered": list(_not_covered(verdicts, reference)),
        "seconds": round(seconds, 1),
    }


def first_difference(verdicts: Sequence[Verdict]) -> dict[str, Any] | None:
    """The first layout that differs, with the batch, row and leaf that are known; None if no layout differs."""
    differ = [(verdict.layout.title, verdict.difference) for verdict in verdicts if verdict.difference is not None]
    if not differ:
        return None
    layout, found = differ[0]
    where = {name: found.where.get(name) for name in ("batch", "row", "leaf")}
    return {"layout": layout, **where, "found": str(found)}


def show(verdicts: Sequence[Verdict], reference: Reference, seconds: float, console: Console) -> None:
    """Print the table, what it shows, and what it does not show."""
    console.print(_table(verdicts))
    for line in (
        *_proof(verdicts, reference),
        *(f"Not covered: {what}." for what in _not_covered(verdicts, reference)),
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    difference = first_difference(verdicts)
    if difference is None:
        console.print(f"[green]ok[/green] in {seconds:.0f} s", highlight=False)
        return
    where = [f"{name} {difference[name]}" for name in ("batch", "row", "leaf") if difference[name] is not None]
    first = ": ".join(part for part in (", ".join([difference["layout"], *where]), difference["found"]) if part)
    differ = sum(verdict.difference is not None for verdict in verdicts)
    line = f"{differ} of {len(verdicts)} layouts differ. The first: {first}"
    console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _table(verdicts: Sequence[Verdict]) -> Table:
    """A line for each layout. Layouts that delivered the same rows have the same digest."""
    table = Table("layout", "processes", "mesh", "batch", "rows", "digest", "", box=SIMPLE, padding=(0, 1, 0, 0))
    for verdict in verdicts:
        layout = verdict.layout
        cells = [layout.name, str(layout.processes), "{} × {}".format(*layout.mesh)]
        if verdict.refused:
            table.add_row(*cells, "", "", "", "not run")
        else:
            cells += [str(verdict.batch_size), f"{verdict.rows:,}", verdict.digest[:8]]
            differs = verdict.difference is not None
            table.add_row(*cells, "differs" if differs else "same", style="red" if differs else None)
    return table


def _proof(verdicts: Sequence[Verdict], reference: Reference) -> Iterator[str]:
    """What was compared and counted."""
    ran = [verdict for verdict in verdicts if not verdict.refused]
    yield (
        f"{sum(verdict.rows for verdict in ran):,} rows in {sum(verdict.batches for verdict in ran):,} batches of "
        f"{len(ran)} layouts compared on all devices that hold them; {reference.different_rows:,} different ones."
    )
    coverage, settings = reference.observed.coverage, reference.observed.settings
    if not isinstance(coverage, Coverage):
        return
    if coverage.epochs:
        left = (
            f"; batches of {settings.batch_size} leave out {coverage.left_out} of each"
            if coverage.left_out
            else ""
        )
        epochs = f"{coverage.epochs} epoch{'s' if coverage.epochs > 1 else ''}"
        yield f"{epochs} of {settings.rows:,} rows: by their indices each row comes once{left}."
    if coverage.source_epochs:
        epochs = f"{coverage.source_epochs} epoch{'s' if coverage.source_epochs > 1 else ''}"
        yield f"{epochs} of the mixture's sources: by their indices each row of the source comes once."
    if coverage.compared:
        yield f"{coverage.compared:,} rows delivered on one device are what the source holds at their index."


def _not_covered(verdicts: Sequence[Verdict], reference: Reference) -> Iterator[str]:
    """What the audit does not show."""
    for verdict in verdicts:
        if verdict.refused:
            yield f"{verdict.layout.title}: {verdict.refused}"
    one_device = reference.observed
    settings, batches = one_device.settings, len(one_device.batches)
    if settings.rows is not None and batches * settings.batch_size < settings.rows:
        yield (
            f"what an epoch's rows after the first {batches * settings.batch_size:,} hold, and its end (only row "
            "indices were counted there; --batches compares more)"
        )
    if isinstance(one_device.coverage, Coverage) and one_device.coverage.not_shown:
        yield one_device.coverage.not_shown
    if settings.transformed:
        yield "whether the transform is right: rows were compared with each other and not with the source"
    yield "other devices than this machine's CPU, and other machines"


def _layout(verdict: Verdict) -> dict[str, Any]:
    layout = verdict.layout
    return {
        "name": layout.name,
        "processes": layout.processes,
        "devices": layout.devices,
        "mesh": dict(zip(("data", "model"), layout.mesh, strict=True)),
        "batch_size": verdict.batch_size,
        "batches": verdict.batches,
        "rows": verdict.rows,
        "digest": verdict.digest,
        "on_one_device": verdict.on_one_device,
        "same": None if verdict.refused else verdict.difference is None,
        "seconds": round(verdict.seconds, 3),
    }
