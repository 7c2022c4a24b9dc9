"""Counts the delivered tokens on request: the position of a feed determines which rows were delivered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from feedline._src.order.epoch import Taken

Indices = npt.NDArray[np.int64]
_CHUNK_ROWS = 1 << 20
"""Maximum rows whose tokens are counted at a time. Bounds the memory."""


class TokenCounts:
    """Counts the tokens of each source, without padding, from the start of epoch 0 to the feed's position.

    The first count may go through all rows of one epoch; each later count continues from the previous one.
    """

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}  # tokens of a whole epoch
        self._latest: dict[str, tuple[int, int, int]] = {}  # epoch, rows counted in it, and their tokens

    def __call__(
        self, taken: Sequence[Taken], tokens_of: Callable[[Indices], Indices | None]
    ) -> dict[str, int] | None:
        """{name of the source: tokens}, or {"all": tokens} without a mixture. None: no source knows its tokens."""
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
