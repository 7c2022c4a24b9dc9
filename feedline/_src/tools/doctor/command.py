"""The commands `feedline doctor` and `feedline diagnose`, and their options."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from feedline._src.tools.cli.options import use_cpu_devices

if TYPE_CHECKING:
    from feedline._src.tools.doctor.findings import Finding

_Command = Annotated[tyro.conf.Suppress[tuple[str, ...]], tyro.conf.arg(help="after --")]


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check this machine, and a training job, for known problems of JAX with several accelerators.

    A job is a function that makes a feed; or a command after --, which runs unchanged while it is observed:

        feedline doctor
        feedline doctor mine:make_feed
        feedline doctor -- python train.py --steps 200

    For each problem, the doctor prints what was found, why it matters, and a fix. Exit code: 2 if an argument is
    wrong; the command's own if the command failed; else 4 with an error, 3 with a warning, 0 with neither.

    Attributes:
      target: module:make_feed, imported from the current folder: make_feed(mesh) builds a feedline.Feed over a
        mesh with the axes data and model. Or a path or glob of files with rows.
      data: file or folder with the data, to measure the read rate of the disk. At most 512 MiB are read.
      cpu_devices: run on this many CPU devices. 0: on the devices that JAX finds. A command may override this.
      limit_s: seconds after which a command is ended, as by Ctrl-C. None: no limit.
      json: print one line of JSON on standard output, in place of the text.
    """

    target: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    data: Path | None = None
    cpu_devices: int = 0
    limit_s: float | None = None
    json: bool = False
    command: _Command = ()

    def run(self) -> int:
        """Make all checks and print the results. Returns the exit code."""
        if self.target is not None and self.command:
            raise ValueError("a job is module:make_feed or a command after --, not both")
        if self.limit_s is not None and not (self.command and 0 < self.limit_s < 1e9):
            raise ValueError("--limit-s must be above 0 seconds, and needs a command after --")
        if self.data is not None and not self.data.exists():
            raise ValueError(f"--data must name a file or a folder, and there is no {self.data}")
        if self.cpu_devices:
            use_cpu_devices(self.cpu_devices)
        from feedline._src.tools.cli.terminal import progress
        from feedline._src.tools.doctor.checks import feed_findings, machine_findings
        from feedline._src.tools.doctor.findings import as_object, as_text, exit_code
        from feedline._src.tools.doctor.job import job_findings, run

        found: list[Finding] = []
        began, failed = time.monotonic(), 0
        if self.command:  # before this process uses a GPU, and thereby takes its memory
            ran = run(self.command, os.environ, self.limit_s)
            found += job_findings(ran)
            failed = 0 if ran.stopped else ran.code
        with progress("doctor", f"checking {self.target or 'this machine'}") as tell:
            if self.target is not None:
                found += feed_findings(self.target)
                tell("checking this machine")
            found += machine_findings(os.environ, self.data)
        seconds = time.monotonic() - began
        if self.json:
            print(json.dumps(as_object(found, seconds)), flush=True)
        else:
            if self.command:
                print()  # separates the results from the command's own output
            print(as_text(found, seconds, min(shutil.get_terminal_size().columns, 120)))
        return failed or exit_code(found)


@dataclasses.dataclass(frozen=True)
class Diagnose:
    """Measure what each stage of input costs a training program, by leaving stages out; see `Feed.diagnose`.

    The program is not changed:

        feedline diagnose -- python train.py

    In each process of the command, one feed is diagnosed: the first from which a loop takes more than --after
    batches. The diagnosis repeats batches, so the process ends right after the last diagnosed step, and saves no
    model that was trained on them. If the loop ends earlier, the program continues and may save such a model: let
    it write to another folder than usual.

    The processes of one run, such as those of feedline launch, wait for each other before they end. --json prints
    the result of each process.

    Attributes:
      steps: batches of the diagnosis, at least 40 with the default buffers.
      after: batches that the loop gets before the diagnosis begins; meanwhile the step is compiled.
      json: print the result as one object on the last line of standard output.
    """

    steps: int = 200
    after: int = 8
    json: bool = False
    command: _Command = ()

    def run(self) -> int:
        """Run the command and return its exit code. ValueError: it succeeded, but no feed was diagnosed."""
        if not self.command:
            raise ValueError("diagnose runs a command: feedline diagnose -- python train.py")
        if self.steps < 1 or self.after < 0:
            raise ValueError(f"--steps must be at least 1 and --after at least 0, got {self.steps}, {self.after}")
        from feedline._src.tools.doctor.job import run

        ran = run(self.command, os.environ, task=f"diagnose {self.after} {self.steps}")
        if self.json and ran.processes:
            print(json.dumps({"diagnosis": ran.processes[0], "processes": ran.processes}), flush=True)
        if ran.code or ran.processes:
            return ran.code
        raise ValueError(
            f"no loop of the command took more than --after {self.after} batches from a feedline.Feed: "
            f"{ran.reason}; let it run longer, or use a smaller --after"
        )
