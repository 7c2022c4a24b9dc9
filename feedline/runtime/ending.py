"""Reads that stop between two pieces once the interpreter ends, so that no thread is inside a C++ library then.

CPython before 3.14 ends a daemon thread when it next asks for the interpreter's lock, by unwinding its stack. C++
code that forbids that aborts the process: "terminate called without an active exception".
"""

from __future__ import annotations

import threading

_ending = threading.Event()


def stop_reads() -> None:
    """The interpreter ends: threads must not begin another piece of a read."""
    _ending.set()


def check_may_read() -> None:
    """Before each piece of a read that takes long.

    Raises:
      SystemExit: this is a daemon thread, and the interpreter ends.
    """
    if _ending.is_set() and threading.current_thread().daemon:
        raise SystemExit
