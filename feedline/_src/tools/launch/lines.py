"""Splits the output of a process into whole lines, each prefixed with a label of the process."""

from __future__ import annotations

import datetime
from collections import deque
from typing import Literal, get_args

_MAX_BYTES = 1 << 16
_REMEMBERED = 20

Label = Literal["number", "slurm", "time", "none"]
"""number: `[2] line`; slurm: `2: line`, as `srun --label`; time: `[2 14:03:59.125] line`; none: `line`."""


class Lines:
    """Splits the chunks that one process writes to one stream into prefixed lines.

    An incomplete line is kept until its end comes, up to 64 KiB.

    Example:
      >>> lines = Lines(2)
      >>> lines.add(b"step 1\\nste")
      b'[2] step 1\\n'
      >>> lines.add(b"p 2"), lines.end()
      (b'', b'[2] step 2\\n')
    """

    def __init__(
        self, process: int, last: deque[tuple[bytes, bytes]] | None = None, label: Label = "number"
    ) -> None:
        """`last` collects the newest lines with their prefixes; the two streams of a process may share it."""
        self.last = recent_lines() if last is None else last
        self._process = process
        self._label = label
        self._incomplete = b""  # Holds no line end, and at most _MAX_BYTES bytes.

    def add(self, chunk: bytes) -> bytes:
        """The lines that `chunk` completes, with their prefixes."""
        *whole, rest = (self._incomplete + chunk).split(b"\n")
        while len(rest) > _MAX_BYTES:
            whole.append(rest[:_MAX_BYTES])
            rest = rest[_MAX_BYTES:]
        self._incomplete = rest
        return self._prefixed(whole)

    def end(self) -> bytes:
        """The last line with its prefix, if it was incomplete."""
        whole, self._incomplete = ([self._incomplete] if self._incomplete else []), b""
        return self._prefixed(whole)

    def _prefixed(self, lines: list[bytes]) -> bytes:
        prefix = prefix_of(self._process, self._label).encode() if lines else b""
        self.last.extend((prefix, line) for line in lines)
        return b"".join(b"%b%b\n" % (prefix, line) for line in lines)


def prefix_of(process: int, label: Label) -> str:
    """What stands before a line of this process that is written now.

    Example:
      >>> prefix_of(2, "number"), prefix_of(2, "slurm"), prefix_of(2, "none")
      ('[2] ', '2: ', '')
    """
    match label:
        case "number":
            return f"[{process}] "
        case "slurm":
            return f"{process}: "
        case "time":
            return f"[{process} {datetime.datetime.now():%H:%M:%S.%f}"[:-3] + "] "
        case "none":
            return ""


def checked_label(label: str) -> Label:
    """The label, if it is one. `ValueError` if it is not."""
    for known in get_args(Label):
        if label == known:
            return label  # type: ignore[return-value]
    raise ValueError(f"label is one of {', '.join(get_args(Label))}, found {label!r}; choose one of them")


def recent_lines() -> deque[tuple[bytes, bytes]]:
    """An empty buffer for the newest lines of a process, each with its prefix before it."""
    return deque(maxlen=_REMEMBERED)
