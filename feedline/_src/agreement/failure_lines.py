"""How a process says that another one has failed, and how the launcher reads that. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BEGINS = "feedline: "
_FAILED = "process {} failed: "
_PATTERN = re.compile((_BEGINS + _FAILED.format(r"(\d+)")).encode())


def as_line(text: str) -> str:
    """A line for the user, as every process writes it.

    Example:
      >>> as_line("process 3 answered again")
      'feedline: process 3 answered again\\n'
    """
    return f"{_BEGINS}{text}\n"


def failure_message(process: int, reason: str) -> str:
    """The failure of a process in words, all in one line.

    Example:
      >>> failure_message(3, "OSError: no space")
      'process 3 failed: OSError: no space'
    """
    return _FAILED.format(process) + " ".join(reason.split())


def failed_process(lines: Sequence[bytes]) -> int | None:
    """The process that failed, from what another one writes when it ends because of that; None: it says nothing.

    The message may stand inside a line: Python writes a traceback piece by piece, and another thread may write
    between two of them.

    Example:
      >>> told = as_line(failure_message(0, "OSError: no space")).encode()
      >>> failed_process([b"step 7", b"feedline.ProcessError: " + told, b"process 1 ends, too"])
      0
    """
    found = map(_PATTERN.search, lines)
    return next((int(match[1]) for match in found if match), None)
