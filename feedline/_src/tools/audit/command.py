"""The `feedline audit` command and its options."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from feedline._src.errors import FeedError
from feedline._src.options import checked_integer

if TYPE_CHECKING:
    from feedline._src.tools.audit.verdict import Reference, Verdict


@dataclasses.dataclass(frozen=True)
class Audit:
    """See on your own data that a feed keeps its promises: the same rows on any layout, each once an epoch.

    It runs the feed on one CPU device, and then on several processes with several devices each, on meshes of
    several shapes, with other threads, workers and batch sizes, stopped and killed half way and resumed on other
    processes. Each process computes a digest of every row on its devices; the rows must equal those of one device,
    bit by bit. Exit code 1: the first layout, batch, row and leaf that differ are printed.

    Attributes:
      target: a path or glob of rows, of which a feed of all leaves is made; or module:make_feed, found from the
        current folder: make_feed(mesh) builds a new feedline.Feed over a mesh with the axes data and model.
      processes: the numbers of processes to run on, with commas between; 1 is always added.
      batches: how many are compared at most, from the start of the feed.
      batch_size: rows in the global batch. None: the feed's own; for a path, about an eighth of its rows. Must be
        a multiple of the devices: the least common multiple of --processes, and at least 4.
      limit_s: how long one layout may take, in seconds.
      json: print one line of JSON on standard output, in place of the table.
      plant: a fault to insert, to see that the audit finds it: two rows of a batch swapped, rows chosen by process
        index in place of the sharding, or a state that counts a batch not yet delivered.
    """

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    processes: str = "1,2,4,8"
    batches: int = 20
    batch_size: int | None = None
    limit_s: float = 60.0
    json: bool = False
    plant: Literal["swap", "local-order", "late-state"] | None = None

    def run(self) -> int:
        """Run all layouts, compare them and print the result. Returns the exit code.

        Raises:
          ValueError: an option is wrong.
          FeedError: a process failed or took too long.
        """
        counts = self.check()
        from rich.console import Console

        from feedline._src.tools.audit import report

        began = time.monotonic()
        try:
            verdicts, reference = self._judged(counts)
        except FeedError as error:
            if not self.json:
                raise
            print(json.dumps({"ok": False, "error": str(error)}), flush=True)
            return 1
        result = report.as_object(verdicts, reference, time.monotonic() - began)
        if self.json:
            print(json.dumps(result), flush=True)
        else:
            report.show(verdicts, reference, result["seconds"], Console())
        return 0 if result["ok"] else 1

    def _judged(self, counts: list[int]) -> tuple[list[Verdict], Reference]:
        from feedline._src.tools.audit.job import Job
        from feedline._src.tools.audit.layouts import launches
        from feedline._src.tools.audit.results import results
        from feedline._src.tools.audit.verdict import Reference, judge
        from feedline._src.tools.cli.terminal import progress

        job = Job(self.target, self.batches, self.batch_size, self.plant)
        planned = launches(counts)
        found = results(job, planned, os.environ, self.limit_s)
        verdicts: list[Verdict] = []
        with progress("audit", "starting 1 process") as show, contextlib.closing(found):
            for layout, observed in found:
                if layout.is_reference:  # the first
                    reference = Reference.of(observed)
                verdicts.append(judge(layout, observed, reference))
                show(f"{len(verdicts)} of {sum(map(len, planned))} layouts done, {layout.title}")
        return verdicts, reference

    def check(self) -> list[int]:
        """The numbers of processes, ascending. Raises `ValueError` if an option is wrong."""
        checked_integer("--batches", self.batches, at_least=4)
        if self.batch_size is not None:
            checked_integer("--batch-size", self.batch_size, at_least=1)
        if not 0 < self.limit_s < 1e9:
            raise ValueError(f"--limit-s must be above 0 and below 1e9 seconds, got {self.limit_s}")
        counts = self.processes.split(",")
        if not all(count.strip().isdecimal() and int(count) for count in counts):
            raise ValueError(f"--processes takes counts with commas between, as 1,2,4, got {self.processes!r}")
        found = sorted({1, *map(int, counts)})
        if self.plant == "local-order" and found == [1]:
            raise ValueError("--plant local-order needs several processes to have an effect; add --processes 1,2")
        return found
