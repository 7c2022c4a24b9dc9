"""Arithmetic of batch sizes: steps of an epoch, rows left out or padded, sizes that fit, memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
        """An epoch of `rows` rows.

        Example:
          >>> Epoch.of(100, 16)
          Epoch(batch_size=16, steps=6, left_out=4, padded_steps=7, padding=12)
        """
        steps, left_out = divmod(rows, batch_size)
        return cls(batch_size, steps, left_out, steps + (left_out > 0), -rows % batch_size)


def next_sizes(batch_size: int, multiple: int) -> list[int]:
    """The next smaller and the next larger batch size that is a multiple of `multiple`; without 0.

    Example:
      >>> next_sizes(64, 8), next_sizes(65, 8), next_sizes(3, 8)
      ([56, 72], [64, 72], [8])
    """
    below = (batch_size - 1) // multiple * multiple
    above = batch_size // multiple * multiple + multiple
    return [below, above] if below else [above]


def fitting_size(batch_size: int, multiple: int) -> int:
    """The batch size itself if it is a multiple of `multiple`, else the next smaller one, else the smallest."""
    return max(multiple, batch_size // multiple * multiple)


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
      device_bytes: of a device.
    """

    host_bytes: int
    host_bytes_on_cpu_devices: int
    host_bytes_as_read: int
    device_bytes: int

    @classmethod
    def of(cls, local_bytes: int, read_bytes: int, shard_bytes: int, *, ahead: int, prefetch: int) -> Memory:
        """The memory of a feed.

        Args:
          local_bytes: of a process-local batch.
          read_bytes: of its leaves that are cast, cut or transformed, as they are read.
          shard_bytes: of a per-device shard.
          ahead: host batches that are read ahead: the buffer, or for a stream the window.
          prefetch: placed batches that wait.

        Example:
          >>> Memory.of(100, 0, 25, ahead=2, prefetch=2)._asdict()
          {'host_bytes': 300, 'host_bytes_on_cpu_devices': 700, 'host_bytes_as_read': 0, 'device_bytes': 100}
        """
        return cls(
            (ahead + 1) * local_bytes,
            (ahead + prefetch + 3) * local_bytes,
            (ahead + 1) * read_bytes,
            (prefetch + 2) * shard_bytes,
        )
