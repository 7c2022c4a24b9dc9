"""Stops long reads when the interpreter exits, so that no thread is inside a C++ library then.

CPython before 3.14 ends a daemon thread when it next asks for the interpreter's lock, by unwinding its stack. C++
code that forbids that aborts the process: "terminate called without an active exception".
"""

from __future__ import annotations

import threading

_ending = threading.Event()


def stop_reads() -> None:
    """Stop long reads before their next piece. Called when the interpreter exits."""
    _ending.set()


def exits() -> bool:
    return _ending.is_set()


def check_may_read() -> None:
    """End this thread if the interpreter exits. Called before each piece of a long read.

    Raises:
      SystemExit: the interpreter exits, and this is a daemon thread.
    """
    if _ending.is_set() and threading.current_thread().daemon:
        raise SystemExit
