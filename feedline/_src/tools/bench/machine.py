"""The machine that is measured: its description, and the memory of its devices. Also: calls in a new process."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import platform
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from feedline._src.cluster.cores import own_cores
from feedline._src.errors import WorkerError
from feedline._src.native.library import implementation
from feedline._src.tools.processes import map_in_processes

KILLED = "its process was killed: the host ran out of memory, or someone ended it"


def in_a_process(call: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run `call(*arguments)` in a new process with the same environment. Returns {"error": ...} if it was killed.

    `call`, its arguments and its result must be picklable. Raises whatever `call` raises. The new process does not
    outlive this function or this process.
    """
    *first, last = arguments
    with contextlib.closing(map_in_processes(functools.partial(call, *first), [last], workers=1)) as results:
        try:
            return next(results)
        except WorkerError:
            return {"error": KILLED}


def describe() -> dict[str, Any]:
    """Processor, cores, memory, system, versions, what gathers columns (C or NumPy), load, and the date."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": own_cores(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "jax": version("jax"),
        "numpy": version("numpy"),
        "columns": implementation(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
    }


def compiled_bytes(executable: jax.stages.Compiled, spec: Any = (), waiting: int = 0) -> dict[str, int]:
    """Bytes of a step on each device, from the compiler: {"arguments", "temporary", "program", "total"}.

    The total includes results that are not written over a donated argument, and `waiting` prefetched batches of
    `spec`.
    """
    analysis: Any = executable.memory_analysis()
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    program = analysis.generated_code_size_in_bytes
    batch = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(spec)
    )
    total = arguments + temporary + results + program + waiting * batch
    return {"arguments": arguments, "temporary": temporary, "program": program, "total": total}


def device_peak() -> int | None:
    """The most bytes that a local device ever held; None if devices do not count bytes, as on the CPU backend."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
