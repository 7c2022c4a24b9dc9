"""How many rows of several sizes does a feed deliver per second, as a share of the memory limit?"""

import functools
import tempfile

import numpy as np
from claims.core import beside_limits
from shared.limit import filler


def feed_cases(scale):
    """Rows per second of feeds from memory and from a mapped file, measured alternately with the memory limit."""
    return {f"rows of {size} B": functools.partial(_measured, size, scale) for size in scale.feed_rows}


def _measured(row_bytes, scale):
    rows = filler(scale.data_bytes // row_bytes * row_bytes).reshape(-1, row_bytes)
    seconds = max(0.3, scale.seconds)  # in less time, the limit's threads may not have started
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, rows)
        file.flush()
        return beside_limits(rows, file.name, int(scale.feed_mb * 1e6), scale.rounds, seconds)
