"""The `feedline audit` command: its options, and its result as a table or as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from typing import Annotated, Any

import tyro

from feedline._src.errors import FeedError
from feedline._src.options import checked_integer


@dataclasses.dataclass(frozen=True)
class Audit:
    """Check on your own data that a feed delivers the same rows on any layout, and each row once per epoch.

    The audit runs the feed on one CPU device. Then it varies the number of processes, the mesh, threads, workers
    and the batch size, and also kills the feed half way and resumes it in new processes.
    Each process computes a digest of every row that its devices hold, bit by bit. Each digest must equal that of
    the same row on one device. Exit code 1: something differs; the first layout, batch, row and leaf are printed.

    Attributes:
      target: a path or glob of files, to audit a feed of all their leaves; or module:make_feed, imported from the
        current folder: make_feed(mesh) builds a new feedline.Feed over a mesh with the axes data and model.
      processes: the numbers of processes to run on, separated by commas; 1 is always added.
      batches: how many batches are compared at most, from the start of the feed.
      batch_size: rows in the global batch. None: the feed's own; for a path, about an eighth of its rows. Must be
        a multiple of the number of devices, which is max(4, the least common multiple of 2 and all --processes).
      limit_s: how long one layout may take, in seconds.
      json: print one line of JSON on standard output, in place of the table.
    """

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    processes: str = "1,2,4,8"
    batches: int = 20
    batch_size: int | None = None
    limit_s: float = 60.0
    json: bool = False

    def run(self) -> int:
        """Run all layouts, compare them and print the result. Returns the exit code."""
        checked_integer("--batches", self.batches, at_least=4)
        if self.batch_size is not None:
            checked_integer("--batch-size", self.batch_size, at_least=1)
        if not 0 < self.limit_s < 1e9:
            raise ValueError(f"--limit-s must be above 0 and below 1e9 seconds, got {self.limit_s}")
        counts = self.processes.split(",")
        if not all(count.strip().isdecimal() and int(count) for count in counts):
            raise ValueError(f"--processes takes counts separated by commas, as in 1,2,4, got {self.processes!r}")
        try:
            result = self._result(sorted({1, *map(int, counts)}))
        except FeedError as error:
            if not self.json:
                raise
            result = {"ok": False, "error": str(error)}
        if self.json:
            print(json.dumps(result), flush=True)
        else:
            _show(result)
        return 0 if result["ok"] else 1

    def _result(self, counts: list[int]) -> dict[str, Any]:
        from feedline._src.tools.audit.layouts import devices_for, launches
        from feedline._src.tools.audit.processes import Job, results
        from feedline._src.tools.audit.verdict import Observed, judge, summary
        from feedline._src.tools.cli.options import is_name
        from feedline._src.tools.cli.terminal import progress
        from feedline._src.tools.targets import load_make_feed

        began, devices = time.monotonic(), devices_for(counts)
        if self.batch_size is not None and self.batch_size % devices:
            raise ValueError(
                f"--batch-size must be a multiple of the {devices} devices on which the audit runs, got "
                f"{self.batch_size}; use {-(-self.batch_size // devices) * devices}, or other --processes"
            )
        if not is_name(self.target):
            load_make_feed(self.target, devices)  # fails before processes start if a path cannot be read
        planned = sum(map(len, launches(counts)))
        layouts: list[dict[str, Any]] = []
        job = Job(self.target, tuple(counts), self.batches, self.batch_size, self.limit_s)
        with progress("audit", "starting 1 process") as show, contextlib.closing(results(job)) as found:
            for layout, observed in found:
                if layout.is_reference:
                    assert isinstance(observed[0], Observed)
                    one_device = observed[0]
                layouts.append(judge(layout, observed, one_device))
                show(f"{len(layouts)} of {planned} layouts done, {layout.title}")
        return summary(layouts, one_device) | {"seconds": round(time.monotonic() - began, 1)}


def _show(result: dict[str, Any]) -> None:
    """Print the table, what the audit covered, what it did not cover, and the first difference."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("layout", "processes", "mesh", "batch", "rows", "digest", "", box=SIMPLE, padding=(0, 1, 0, 0))
    for layout in result["layouts"]:
        cells = [layout["name"], str(layout["processes"]), " × ".join(map(str, layout["mesh"].values()))]
        if layout["not_run"]:
            table.add_row(*cells, "", "", "", "not run")
            continue
        cells += [str(layout["batch_size"]), f"{layout['rows']:,}", layout["digest"][:8]]
        verdict, style = ("same", None) if layout["same"] else ("differs", "red")
        table.add_row(*cells, verdict, style=style)
    console.print(table)
    show = functools.partial(console.print, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    for line in (*result["covered"], *(f"Not covered: {what}." for what in result["not_covered"])):
        show(line)
    first = result["difference"]
    if first is None:
        console.print(f"[green]ok[/green] in {result['seconds']:.0f} s", highlight=False)
        return
    place = [f"{name} {first[name]}" for name in ("batch", "row", "leaf") if first[name] is not None]
    differ = sum(layout["difference"] is not None for layout in result["layouts"])
    line = (
        f"{differ} of {len(result['layouts'])} layouts differ. The first: {', '.join([first['layout'], *place])}"
    )
    show(f"{line}: {first['found']}", style="red")
