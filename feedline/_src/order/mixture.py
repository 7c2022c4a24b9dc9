"""Which row of which source stands at which position of a mixture: a pure function of (seed, epoch, position).

`shares` determines which source stands at a position, and how many of its rows stand before. Row number c of a
source, counted over the whole run, is at position (c mod length) of epoch (c div length) in that source's order.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feedline._src.native.gather import rows_at_positions
from feedline._src.native.library import library
from feedline._src.options import Order
from feedline._src.order.compiled import EpochOrder, MixedSource, mixed_order
from feedline._src.order.epoch import SingleOrder, Taken, rows_at, substitutes_at
from feedline._src.order.permutation import words
from feedline._src.order.schedule import ENDLESS
from feedline._src.order.shares import Phase, Span, spans_of

End = Literal["endless", "first_exhausted", "all_exhausted"]
_MOST_EPOCHS = 64  # of all sources in one C call
_STRUCTS = 16  # of C calls, cached
Indices = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class MixtureOrder:
    """Which row stands at which position of a mixture. Row indices count the sources one after the other.

    Attributes:
      names: of the sources.
      lengths: the rows of each source.
      orders: the order of each source.
      phases: the weights, by ascending start; the first one starts at 0.
      end: when an epoch ends.
      seed: of the keys of a transform, and of the rows that replace bad ones.

    Raises:
      ValueError: `end` is "all_exhausted", and a source is never exhausted.

    Example:
      >>> order = MixtureOrder(("a", "b"), (4, 3), (Order(shuffle=False),) * 2, (Phase(0, (2, 1)),))
      >>> order.rows_at(0, range(9)).tolist()
      [0, 4, 1, 2, 5, 3, 0, 6, 1]
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    orders: tuple[Order, ...]
    phases: tuple[Phase, ...]
    end: End = "endless"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.end not in get_args(End):
            raise ValueError(f"end must be one of {get_args(End)}, got {self.end!r}")
        _ = self.rows  # which may raise

    @functools.cached_property
    def rows(self) -> int:
        """The positions of an epoch. Without an end that is `ENDLESS`."""
        if self.end == "endless":
            return ENDLESS
        ends = {}
        for source, (name, length) in enumerate(zip(self.names, self.lengths, strict=True)):
            found = [span.after_row(source, length - 1) for span in self._spans]
            ends[name] = next((end for end in found if end is not None), None)
        reached = [end for end in ends.values() if end is not None]
        if self.end == "first_exhausted":
            return min(reached)
        for name, end in ends.items():
            if end is None:
                raise ValueError(
                    f'end="all_exhausted" needs every source to give each row once, and {name!r} has weight '
                    '0 before it has; give it a weight in the last phase, or end="first_exhausted"'
                )
        return max(reached)

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """The row index of the first row of each source, and the number of all rows."""
        return tuple(itertools.accumulate(self.lengths, initial=0))

    def rows_at(self, epoch: int, positions: Indices | range) -> Indices:
        """The row index at each position of an epoch.

        Args:
          epoch: each source goes on where the epoch before left it.
          positions: int64[k] in [0, rows); or a range of step 1. They are fastest if they ascend.

        Returns:
          int64[k], a new array.

        Raises:
          IndexError: a position is not in [0, rows).
        """
        if library() is not None and (struct := self.struct(epoch, positions)) is not None:
            return rows_at_positions(struct, positions)
        if isinstance(positions, range):
            positions = np.arange(positions.start, positions.stop)
        rows = np.empty(len(positions), np.int64)
        sources, counters = self._counters(epoch, positions)
        for source in range(len(self.names)):
            here = np.flatnonzero(sources == source)
            if len(here):
                rows[here] = self._rows_of(source, counters[here])
        return rows

    def struct(self, epoch: int, positions: Indices | range) -> EpochOrder | None:
        """What the C library needs for these positions; None where NumPy must compute them.

        NumPy computes stretches over the border of two phases, and those with very many epochs of a source.
        """
        if not len(positions):
            return None
        if isinstance(positions, range):
            first, last = positions[0], positions[-1]
        else:
            first, last = int(positions.min()), int(positions.max())
        self._check(first, last)
        span = self._spans[self._number_at(first)]
        if last >= span.stop:
            return None
        table = span.table
        tables = (first - span.start) // table.size, (last - span.start) // table.size + 1
        before = [a + b for a, b in zip(self._before(epoch), span.before, strict=True)]
        epochs = []  # for each source, the epochs of it that occur in these tables
        for begin, places, length in zip(before, table.of_source, self.lengths, strict=True):
            low, high = (begin + number * len(places) for number in tables)
            epochs.append(range(low // length, -(-high // length)))
        if sum(map(len, epochs)) > _MOST_EPOCHS:
            return None
        key = epoch, span.start, *epochs
        if (struct := self._structs.get(key)) is None:
            sources = [
                MixedSource.of(order, own, length=length, before=begin, step=len(places), first_row=first_row)
                for order, own, length, begin, places, first_row in zip(
                    self.orders, epochs, self.lengths, before, table.of_source, self.firsts, strict=False
                )
            ]
            if len(self._structs) >= _STRUCTS:
                self._structs.clear()
            struct = self._structs[key] = mixed_order(self.rows, span.start, table.source, table.rank, sources)
        return struct

    @functools.cached_property
    def _structs(self) -> dict[Any, EpochOrder]:
        return {}

    def __reduce__(self) -> Any:  # without what was computed, which has pointers
        return MixtureOrder, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def own_positions(self, epochs: Indices, positions: Indices) -> tuple[Indices, Indices]:
        """Where each (epoch, position) of the mixture lies in its source's own order: (epochs, positions)."""
        counters, lengths = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            sources, counters[here] = self._counters(epoch, positions[here])
            lengths[here] = np.array(self.lengths)[sources]
        return counters // lengths, counters % lengths

    def taken(self, position: int) -> tuple[int, ...]:
        """How many rows of each source stand before a position of an epoch."""
        return self._spans[self._number_at(position)].taken(position)

    def taken_before(self, epoch: int, position: int) -> tuple[Taken, ...]:
        """See `RowOrder`."""
        rows = map(sum, zip(self._before(epoch), self.taken(position), strict=True))
        orders = itertools.starmap(SingleOrder, zip(self.orders, self.lengths, strict=True))
        return tuple(itertools.starmap(Taken, zip(self.names, self.firsts, orders, rows, strict=False)))

    @property
    def shown(self) -> MixtureOrder:
        return self

    def substitutes(self, epoch: int, position: int, row: int) -> Indices:
        """Rows of the source of the bad row, so that the shares stay as they are."""
        source = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return substitutes_at(self.seed, self.lengths[source], epoch, position) + self.firsts[source]

    def as_json(self) -> dict[str, Any]:
        """JSON values, for a fingerprint. A weight is the source's number of rows in a block; 0 is left out."""
        return {
            "seed": self.seed,
            "end": self.end,
            "orders": {n: dataclasses.asdict(order) for n, order in zip(self.names, self.orders, strict=True)},
            "phases": [
                [phase.start, {name: count for name, count in zip(self.names, phase.counts, strict=True) if count}]
                for phase in self.phases
            ],
        }

    @functools.cached_property
    def _spans(self) -> tuple[Span, ...]:
        return spans_of(self.phases)

    def _number_at(self, position: int) -> int:
        """The number of the phase of a position."""
        return bisect.bisect_right(self.phases, position, key=lambda phase: phase.start) - 1

    def _before(self, epoch: int) -> tuple[int, ...]:
        """How many rows of each source come before an epoch."""
        if not epoch:
            return (0,) * len(self.lengths)
        of_epoch = self.taken(self.rows)
        if max(of_epoch) * (epoch + 1) >= 1 << 63:
            raise ValueError(
                f"a run takes fewer than 2^63 rows of each source, and epoch {epoch} is too late for that; seek "
                "to an earlier epoch"
            )
        return tuple(epoch * count for count in of_epoch)

    def _counters(self, epoch: int, positions: Indices) -> tuple[NDArray[np.int32], Indices]:
        """The source at each of these positions, and how many rows of it come before that one in the whole run."""
        sources, counters = np.empty(len(positions), np.int32), np.empty(len(positions), np.int64)
        if not len(positions):
            return sources, counters
        self._check(int(positions.min()), int(positions.max()))
        before = np.array(self._before(epoch))
        first, last = self._number_at(int(positions.min())), self._number_at(int(positions.max()))
        for span in self._spans[first : last + 1]:
            here: Any = slice(None)
            if first < last:
                here = np.flatnonzero((positions >= span.start) & (positions < span.stop))
            sources[here], counters[here] = span.counters(positions[here])
            counters[here] += before[sources[here]]
        return sources, counters

    def _check(self, first: int, last: int) -> None:
        if first < 0 or last >= self.rows:
            raise IndexError(f"positions must be in [0, {self.rows}), got {first} to {last}")

    def _rows_of(self, source: int, counters: Indices) -> Indices:
        """The row index of each of these rows of a source."""
        order, length = self.orders[source], self.lengths[source]
        epochs, rows = np.divmod(counters, length)
        cuts = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(counters)]
        for start, stop in itertools.pairwise(cuts if order.shuffle and length > 1 else ()):
            rows[start:stop] = rows_at(order, length, int(epochs[start]), rows[start:stop])
        rows += self.firsts[source]
        return rows


def seed_of_source(seed: int, source: int) -> int:
    """The seed of the order of source number `source` in a mixture with this seed."""
    return int(words("mixture", seed, source)[0])
