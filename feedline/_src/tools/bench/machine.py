"""Describes the machine and the versions of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from feedline._src.cluster.cores import own_cores
from feedline._src.native.library import implementation


def describe() -> dict[str, Any]:
    """Processor, cores, memory, system, versions, what gathers columns, the current load, and the date.

    Example:
      >>> sorted(describe())
      ['columns', 'cores', 'date', 'jax', 'load', 'memory_gib', 'numpy', 'processor', 'python', 'system']
    """
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


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
