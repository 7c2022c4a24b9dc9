"""What the one who starts processes tells them, and how they answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

Fault = Literal["swap", "local-order", "late-state"]

DONE = "feedline audit: done"
"""A process says it with 0 once it has joined the others, and with k after layout k of the launch, from 1."""


@dataclasses.dataclass(frozen=True)
class Job:
    """The same for all launches. See the options of `feedline audit`."""

    target: str
    batches: int
    batch_size: int | None
    plant: Fault | None

    @property
    def half(self) -> int:
        """Batches before a stop."""
        return (self.batches + 1) // 2


def job_file(folder: Path, launch: int) -> Path:
    """Where a launch finds the job and its layouts."""
    return folder / f"{launch}.job"


def result_file(folder: Path, launch: int, layout: int, process: int) -> Path:
    """Where a process writes what it held in a layout."""
    return folder / f"{launch}.{layout}.{process}.result"
