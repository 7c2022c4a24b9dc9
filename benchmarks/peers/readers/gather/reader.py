"""The fastest gather known: limit/reader.py with feedline's gather in C in place of np.take. Nothing is placed."""

import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))

from shared.limit import fastest_gather

copied = runpy.run_path(str(Path(__file__).parents[1] / "limit" / "reader.py"))["copied"]


def batches(task):
    """Yield each buffer once it is full. It is overwritten after the next buffer is requested."""
    return copied(task, fastest_gather(task.load()))
