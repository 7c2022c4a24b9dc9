"""The epoch and position of each delivered row, computed independently of feedline's schedule. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from feedline._src.tools.audit.observed import Settings

EpochPosition = tuple[int, int]


def batch_starts(settings: Settings, after: EpochPosition = (0, 0)) -> Iterator[EpochPosition]:
    """(epoch, position) of the first row of each batch, where the first batch starts at `after` or later.

    Example:
      >>> ten = Settings(rows=10, batch_size=4, remainder="drop", epochs=None, transformed=False)
      >>> [start for start, _ in zip(batch_starts(ten), range(3), strict=False)]
      [(0, 0), (0, 4), (1, 0)]
    """
    rows, size, (epoch, position) = settings.rows, settings.batch_size, after
    while rows is None:  # a stream: the length of its epochs is unknown
        yield epoch, position
        position += size
    while True:
        if settings.remainder == "wrap":
            epoch, position = epoch + position // rows, position % rows
            if settings.epochs and (settings.epochs - epoch % settings.epochs) * rows - position < size:
                epoch, position = (epoch // settings.epochs + 1) * settings.epochs, 0
        elif position + (size if settings.remainder == "drop" else 1) > rows:
            epoch, position = epoch + 1, 0
        yield epoch, position
        position += size


def row_positions(
    settings: Settings, first: EpochPosition, batches: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Epoch and position of each row, each int64[batches, batch_size]. Padded rows have a position ≥ rows."""
    begin = np.array([start for start, _ in zip(batch_starts(settings, first), range(batches), strict=False)])
    begin = begin.reshape(batches, 2, 1)
    position = begin[:, 1] + np.arange(settings.batch_size)
    epoch = np.broadcast_to(begin[:, 0], position.shape)
    if settings.remainder == "wrap" and settings.rows is not None:
        return epoch + position // settings.rows, position % settings.rows
    return epoch, position
