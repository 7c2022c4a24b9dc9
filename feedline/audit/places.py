"""At which (epoch, position) the rows of a run stand: the audit's own arithmetic, beside feedline's. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from feedline.audit.held import Settings

Place = tuple[int, int]


def starts(settings: Settings, after: Place = (0, 0)) -> Iterator[Place]:
    """(epoch, position) of the first row of each batch that comes after the rows before `after`.

    Example:
      >>> ten = Settings(rows=10, batch_size=4, remainder="drop", epochs=None, transformed=False)
      >>> [place for place, _ in zip(starts(ten), range(3), strict=False)]
      [(0, 0), (0, 4), (1, 0)]
    """
    rows, size, (epoch, position) = settings.rows, settings.batch_size, after
    while rows is None:  # a stream: it alone knows where its epochs end
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


def places(settings: Settings, first: Place, batches: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """int64[batches, batch_size] twice: epoch and position of each row. Where it is padded, position ≥ rows."""
    begin = np.array([place for place, _ in zip(starts(settings, first), range(batches), strict=False)])
    begin = begin.reshape(batches, 2, 1)
    position = begin[:, 1] + np.arange(settings.batch_size)
    epoch = np.broadcast_to(begin[:, 0], position.shape)
    if settings.remainder == "wrap" and settings.rows is not None:
        return epoch + position // settings.rows, position % settings.rows
    return epoch, position
