"""A trace: the records of a feed for some time, and the file to which they are written."""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from feedline._src.observe.accounting import Delivered

MOST_PARTS = 100_000
"""Parts of batches that a trace holds: 60 MB of memory, 140 MB of file, or 14 MB compressed, written in 8 s."""


class Recording:
    """The latest records of a feed, of which `MOST_PARTS` parts are kept. One thread at a time calls `keep`.

    Attributes:
      records: the oldest first.
      left_out: how many batches before them were not kept.
    """

    def __init__(self) -> None:
        self.records: collections.deque[Delivered | float] = collections.deque()
        self.left_out = 0
        self._parts = 0  # of `records`

    def keep(self, record: Delivered | float) -> None:
        """Keep one more record, and let go of the oldest ones where there are too many."""
        self.records.append(record)
        self._parts += _parts_in(record)
        while self._parts > MOST_PARTS and len(self.records) > 1:
            oldest = self.records.popleft()
            self._parts -= _parts_in(oldest)
            self.left_out += isinstance(oldest, Delivered)


def _parts_in(record: Delivered | float) -> int:
    return max(1, len(record.parts)) if isinstance(record, Delivered) else 1


def file_of_process(path: str | os.PathLike[str], process: int, processes: int) -> Path:
    """The absolute path to which this process writes its trace.

    Raises:
      OSError: it is a folder or no regular file, or its folder is missing or not writable.
    """
    path = Path(path).absolute()
    if processes > 1:
        name, dot, suffixes = path.name.partition(".")
        path = path.with_name(f"{name}-process{process}{dot}{suffixes}")
    if path.is_dir():
        raise IsADirectoryError(f"a trace is written to a file, and {path} is a folder; add a name to it")
    if path.exists() and not path.is_file():
        raise OSError(f"a trace is written to a regular file, and {path} is none; use another name")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"a trace is written into a folder that exists, and {path.parent} does not; create it before"
        )
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(
            f"a trace is written into a folder with permission to write, and {path.parent} gives none; use another"
        )
    return path


def write_trace(path: Path, events: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write the file whole, or not at all; compressed if it ends in ".gz".

    Args:
      facts: about the whole trace.

    Raises:
      OSError: it could not be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with (
            gzip.open(partial, "wt", compresslevel=5, encoding="utf-8")
            if path.suffix == ".gz"
            else partial.open("w", encoding="utf-8")
        ) as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
