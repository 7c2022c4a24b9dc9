"""How many rows of several sizes does a feed deliver per second, as a share of the memory limit?"""

import functools
import tempfile
from pathlib import Path

from claims.feed import matrix


def feed_cases(scale):
    """Rows per second of feeds from memory and from a mapped file, measured alternately with the memory limit."""
    return {f"rows of {size} B": functools.partial(_measured, size, scale) for size in scale.feed_rows}


def _measured(row_bytes, scale):
    with tempfile.TemporaryDirectory() as folder:
        sizes, batches = [row_bytes], [int(scale.feed_mb * 1e6)]
        seconds = max(0.3, scale.seconds)  # in less time, the limit's threads may not have started
        (found,) = matrix(Path(folder), scale.data_bytes, sizes, batches, scale.rounds, seconds, lambda _: None)
    return found
