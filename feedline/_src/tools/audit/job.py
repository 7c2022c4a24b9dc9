"""The files and lines by which the audit and the processes that it starts communicate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

Fault = Literal["swap", "local-order", "late-state"]

DONE = "feedline audit: done"
"""A process prints this with 0 once it has joined the others, and with k after layout k of its launch, from 1."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What all launches have in common. See the options of `feedline audit`."""

    target: str
    batches: int
    batch_size: int | None
    plant: Fault | None

    @property
    def half(self) -> int:
        """The number of batches of a layout that stops half way."""
        return (self.batches + 1) // 2


def job_file(folder: Path, launch: int) -> Path:
    """The file from which a launch reads the job and its layouts."""
    return folder / f"{launch}.job"


def result_file(folder: Path, launch: int, layout: int, process: int) -> Path:
    """The file to which a process writes what it observed in a layout."""
    return folder / f"{launch}.{layout}.{process}.result"
