"""Runs a measurement in a process of its own: it begins with fresh devices, and may be killed for its memory."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

KILLED = "its process was killed: the host ran out of memory, or someone ended it"


def in_a_process(call: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """`call(*arguments)` in a new process with the same environment. {"error": ...} if that process was killed.

    The call, its arguments and its result must be picklable. Exceptions come through.

    Example:
      >>> in_a_process(dict, [("answer", 42)])
      {'answer': 42}
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        try:
            return pool.submit(call, *arguments).result()
        except BrokenProcessPool:
            return {"error": KILLED}
