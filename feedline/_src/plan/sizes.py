"""Arithmetic of batch sizes: which fit, steps of an epoch, rows left out or padded, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from feedline._src.options import Settings
from feedline._src.order.schedule import Cursor, Schedule
from feedline._src.plan.asked import Asked

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


def refused_auto_prefetch(asked: Asked, *, read_everywhere: bool) -> Iterator[str]:
    """Why `prefetch` cannot be "auto" for a stream. The argument is that of `stream_window`."""
    if "prefetch" in asked.tunable and not read_everywhere:
        yield (
            "processes that read different lanes agree on the ends of these in windows of `prefetch` batches, "
            'so prefetch must be the same everywhere and cannot be "auto"; give a number, such as prefetch=2'
        )


def stream_window(prefetch: int, *, read_everywhere: bool) -> int:
    """Batches of a stream after which its processes agree on whether it has ended.

    Args:
      read_everywhere: whether each process reads all lanes, so that none needs to ask another.
    """
    return 1 if read_everywhere else max(1, prefetch)


def refused_size(size: int, multiple: int, shards: int, lanes: int) -> Iterator[str]:
    """Why a batch size does not fit the sharding or the lanes.

    Args:
      multiple: what every batch size is a multiple of.
      shards: of the batch axis.

    Example:
      >>> next(refused_size(30, 4, 4, 0))
      'The batch size must be a multiple of the 4 shards of the batch axis, got 30; 28 or 32 would work.'
    """
    if size % multiple:
        parts = f"{shards} shards of the batch axis"
        rule = parts if multiple == shards else f"{parts} and of the {lanes} lanes, so of {multiple}"
        sizes = " or ".join(f"{n:,}" for n in next_sizes(size, multiple))
        yield f"The batch size must be a multiple of the {rule}, got {size:,}; {sizes} would work."


def refused_rows(rows: int, size: int, multiple: int, asked: Asked) -> Iterator[str]:
    """Why `rows` rows give no batch of this size, or no whole number of calls."""
    remainder, epochs, steps = asked.remainder, asked.epochs, asked.steps_per_call
    # an endless feed wraps as often as it must
    available = rows if remainder == "drop" else rows * (epochs or size)
    if remainder != "pad" and available < size:
        fitting = available // multiple * multiple
        smaller = f"a batch size of at most {fitting:,}" if fitting else "fewer shards of the batch axis"
        yield (
            f'Remainder "{remainder}" drops a batch that is not full, and {available:,} '
            f"{'row' if available == 1 else 'rows'} cannot fill one of {size:,}; use {smaller}, "
            'or remainder "pad".'
        )
    elif steps > 1:
        yield from Schedule(rows, size, remainder, epochs).refused_steps(Cursor(0, 0), steps)


class Memory(NamedTuple):
    """Memory of a feed by the formulas of docs/design.md, "Sizes". All in bytes.

    Attributes:
      host_bytes: of a process, where batches are placed on accelerators.
      host_bytes_on_cpu_devices: of a process, where they are placed on CPU devices, whose arrays lie in it too.
      host_bytes_as_read: of a process, in addition to either, for leaves that are cast, cut or transformed.
      shared_bytes: of a process in /dev/shm, at most, where worker processes read.
      device_bytes: of a device.
    """

    host_bytes: int
    host_bytes_on_cpu_devices: int
    host_bytes_as_read: int
    shared_bytes: int
    device_bytes: int

    @classmethod
    def of(cls, local_bytes: int, read_bytes: int, shard_bytes: int, settings: Settings) -> Memory:
        """The memory of a feed.

        Args:
          local_bytes: of a process-local batch.
          read_bytes: of its leaves that are cast, cut or transformed, as they are read.
          shard_bytes: of a per-device shard.

        Example:
          >>> Memory.of(100, 0, 25, Settings(threads=0, workers=0, buffer=2, prefetch=2))[:2]
          (300, 700)
        """
        return cls(
            settings.host_batches * local_bytes,
            settings.host_batches_on_cpu_devices * local_bytes,
            settings.host_batches * read_bytes,
            settings.shared_batches * local_bytes,
            settings.device_batches * shard_bytes,
        )
