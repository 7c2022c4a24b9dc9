"""Tokens that were delivered, counted by whoever asks: which rows came is arithmetic, and so are their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from feedline._src.order.epoch import Taken

Indices = npt.NDArray[np.int64]
_AT_ONCE = 1 << 20
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
        epoch, rest = divmod(taken.rows, taken.order.rows)
        if epoch and taken.name not in self._whole:
            self._whole[taken.name] = self._summed(taken, None, range(taken.order.rows), tokens_of)
        counted_epoch, rows, tokens = self._latest.get(taken.name, (epoch, 0, 0))
        if counted_epoch != epoch or rows > rest:
            rows = tokens = 0
        tokens += self._summed(taken, epoch, range(rows, rest), tokens_of)
        self._latest[taken.name] = epoch, rest, tokens
        return epoch * self._whole.get(taken.name, 0) + tokens

    def _summed(
        self, taken: Taken, epoch: int | None, positions: range, tokens_of: Callable[[Indices], Indices | None]
    ) -> int:
        """The tokens at some positions of an epoch; with None, of the rows with these numbers."""
        found = 0
        for start in range(positions.start, positions.stop, _AT_ONCE):
            some = range(start, min(start + _AT_ONCE, positions.stop))
            rows = np.arange(some.start, some.stop) if epoch is None else taken.order.rows_at(epoch, some)
            tokens = tokens_of(rows + taken.first)
            found += 0 if tokens is None else int(tokens.sum())
        return found
