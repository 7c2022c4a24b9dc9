"""Tokens that were delivered, counted by whoever asks: which rows came is arithmetic, and so are their tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from feedline._src.order.epoch import Taken

Indices = npt.NDArray[np.int64]
_CHUNK_ROWS = 1 << 20
"""Rows whose tokens are added up at a time, to bound the memory."""


class TokenCounts:
    """Tokens without padding of each source, from the start of the run to a place.

    The first count takes a pass over the numbers of all rows of one epoch; later ones go on from the one before.
    """

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}  # of an epoch
        self._latest: dict[str, tuple[int, int, int]] = {}  # epoch, its rows until there, and their tokens

    def __call__(
        self, taken: Sequence[Taken], tokens_of: Callable[[Indices], Indices | None]
    ) -> dict[str, int] | None:
        """{name of the source: tokens}; without a mixture under "all". None: no source knows them."""
        known = [each for each in taken if tokens_of(np.array([each.first])) is not None]
        return {each.name or "all": self._count(each, tokens_of) for each in known} or None

    def _count(self, taken: Taken, tokens_of: Callable[[Indices], Indices | None]) -> int:
        def summed(rows_at: Callable[[range], Indices], start: int, stop: int) -> int:
            chunks = (range(at, min(at + _CHUNK_ROWS, stop)) for at in range(start, stop, _CHUNK_ROWS))
            counts = (tokens_of(rows_at(chunk) + taken.first) for chunk in chunks)
            return sum(int(count.sum()) for count in counts if count is not None)

        epoch, rows = divmod(taken.rows, taken.order.rows)
        if epoch and taken.name not in self._whole:
            self._whole[taken.name] = summed(lambda chunk: np.arange(chunk.start, chunk.stop), 0, taken.order.rows)
        counted_epoch, counted, tokens = self._latest.get(taken.name, (epoch, 0, 0))
        if counted_epoch != epoch or counted > rows:
            counted = tokens = 0
        tokens += summed(functools.partial(taken.order.rows_at, epoch), counted, rows)
        self._latest[taken.name] = epoch, rows, tokens
        return epoch * self._whole.get(taken.name, 0) + tokens
