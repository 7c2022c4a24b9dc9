"""Arithmetic of batch sizes: steps of an epoch, rows left out or padded, sizes that divide the rows, memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from feedline._src.options import Settings

_WINDOW = 1 << 18
"""So many multiples on each side of a batch size are tried as divisors."""


class Epoch(NamedTuple):
    """An epoch in batches of one size.

    Attributes:
      batch_size: rows in the global batch.
      steps: whole batches: the steps with remainder "drop".
      left_out: rows that "drop" leaves out.
      padded_steps: the steps with remainder "pad".
      padding: rows that "pad" repeats in the last batch.
    """

    batch_size: int
    steps: int
    left_out: int
    padded_steps: int
    padding: int

    @classmethod
    def of(cls, rows: int, batch_size: int) -> Epoch:
        """An epoch of `rows` rows."""
        steps, left_out = divmod(rows, batch_size)
        return cls(batch_size, steps, left_out, steps + (left_out > 0), -rows % batch_size)


def whole_sizes(rows: int, batch_size: int, multiple: int, most: int = 4) -> list[int]:
    """Batch sizes that are multiples of `multiple` and divide `rows`, at most four times smaller or larger.

    Returns:
      Those nearest to `batch_size` by their ratio to it, ascending; at most `most`.

    Example:
      >>> whole_sizes(1000, 64, 8)
      [40, 200]
    """
    middle = max(1, batch_size // multiple)
    first, last = max(1, middle // 4, middle - _WINDOW), min(middle * 4, middle + _WINDOW, rows // multiple)
    candidates = np.arange(first, last + 1, dtype=np.int64) * multiple
    found = candidates[rows % candidates == 0].tolist() if len(candidates) else []
    return sorted(sorted(found, key=lambda size: max(size / batch_size, batch_size / size))[:most])


class Memory(NamedTuple):
    """Memory of a feed by the formulas of docs/design.md, "Sizes". All in bytes.

    Attributes:
      host_bytes: of a process, where batches are placed on accelerators.
      host_bytes_on_cpu_devices: of a process, where they are placed on CPU devices, whose arrays lie in it too.
      host_bytes_as_read: of a process, in addition to either, for leaves that are cast, cut or transformed.
      shared_bytes: of a process, at most, in batches on their way from workers.
      device_bytes: of a device.
    """

    host_bytes: int
    host_bytes_on_cpu_devices: int
    host_bytes_as_read: int
    shared_bytes: int
    device_bytes: int

    @classmethod
    def of(cls, local_bytes: int, read_bytes: int, shard_bytes: int, settings: Settings) -> Memory:
        """The memory of a feed."""
        return cls(
            settings.host_batches * local_bytes,
            settings.host_batches_on_cpu_devices * local_bytes,
            settings.host_batches * read_bytes,
            settings.shared_batches * local_bytes,
            settings.device_batches * shard_bytes,
        )
