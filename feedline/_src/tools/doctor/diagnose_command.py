"""The `feedline diagnose` command and its options."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class Diagnose:
    """Measure what each stage of input costs a training program, by leaving stages out; see `Feed.diagnose`.

    The program is not changed:

        feedline diagnose -- python train.py

    The first feed that a loop takes some batches from is diagnosed, in each process of the command. After the last
    of these steps the process ends at once, so that it does not save what it learned from repeated batches. A loop
    that ends before goes on, and so may save that: let the program write to another folder.

    Attributes:
      steps: batches of the diagnosis, at least 40 with the default buffers.
      after: batches that the loop gets before; they compile the step.
      json: print the result as one object on the last line of standard output.
    """

    steps: int = 200
    after: int = 8
    json: bool = False
    command: Annotated[tyro.conf.Suppress[tuple[str, ...]], tyro.conf.arg(help="after --")] = ()

    def run(self) -> int:
        """Run the command. Returns 0, or 1 if no feed was diagnosed; its own exit code if it failed.

        Raises:
          ValueError: an option is wrong.
        """
        if not self.command:
            raise ValueError("diagnose runs a command: feedline diagnose -- python train.py")
        if self.steps < 1 or self.after < 0:
            raise ValueError(f"--steps must be at least 1 and --after at least 0, got {self.steps}, {self.after}")
        from feedline._src.tools.doctor.job import run_with

        module = "feedline._src.tools.doctor.inside.diagnose"
        ran = run_with(module, self.command, os.environ, given=f"{self.after} {self.steps}")
        if self.json and ran.processes:
            print(json.dumps({"diagnosis": ran.processes[0], "processes": ran.processes}), flush=True)
        if ran.code or ran.processes:
            return ran.code
        raise ValueError(
            f"no loop of the command took more than --after {self.after} batches from a feedline.Feed: "
            f"{ran.reason or 'none was used so long'}; let it run longer, or use a smaller --after"
        )
