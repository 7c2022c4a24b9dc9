"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from feedline.cluster.cores import own_cores
from feedline.native.library import implementation


def describe() -> dict[str, Any]:
    """Processor, cores, memory, system, versions, what gathers columns, and how busy the machine is just now.

    Example:
      >>> sorted(describe())
      ['columns', 'cores', 'jax', 'load', 'memory_gib', 'numpy', 'processor', 'python', 'system']
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
    }


def _processor() -> str:
    told = Path("/proc/cpuinfo")
    if told.exists():
        for line in told.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
