"""What became of an input of `fuzz.py`."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """The outcome of an input: one of `fuzz.EXPECTED`, or one that refutes; and the error, if there is one."""

    kind: str
    detail: str = ""
