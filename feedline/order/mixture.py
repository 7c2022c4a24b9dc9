"""Which row of which source stands at which position of a mixture: a pure function of (seed, epoch, position).

The positions are cut into blocks. A block holds counts[i] rows of source i, at the same places in every block (see
`apportionment`). So a division and a table say which source stands at position p, and how many of its rows stand
before it, however large p is.

Row number c of source i, counted over the whole run, stands at position c mod length of epoch c div length in that
source's own order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from feedline.options import Order
from feedline.order.apportionment import Places, places_of
from feedline.order.epoch import rows_at
from feedline.order.permutation import words

End = Literal["endless", "first_exhausted", "all_exhausted"]
ENDLESS = sys.maxsize
"""The rows of an epoch without an end, as in Grain's `repeat`."""
Indices = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Stage:
    """From position `start` on, each block holds `counts[i]` rows of source i."""

    start: int
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MixtureOrder:
    """Which row stands at which position of a mixture. Row indices count the sources one after the other.

    Attributes:
      names: of the sources.
      lengths: the rows of each source.
      orders: the order of each source.
      stages: the weights, by ascending start; the first one starts at 0.
      end: when an epoch ends.
      seed: of the keys of a transform, and of the rows that replace bad ones.

    Raises:
      ValueError: `end` is "all_exhausted", and a source is never exhausted.

    Example:
      >>> order = MixtureOrder(("a", "b"), (4, 3), (Order(shuffle=False),) * 2, (Stage(0, (2, 1)),))
      >>> order.rows_at(0, range(9)).tolist()
      [0, 4, 1, 2, 5, 3, 0, 6, 1]
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    orders: tuple[Order, ...]
    stages: tuple[Stage, ...]
    end: End = "endless"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.end not in get_args(End):
            raise ValueError(f"end must be one of {get_args(End)}, got {self.end!r}")

    @functools.cached_property
    def rows(self) -> int:
        """The positions of an epoch. Without an end that is `ENDLESS`."""
        if self.end == "endless":
            return ENDLESS
        ends = [self._after_row(source, length - 1) for source, length in enumerate(self.lengths)]
        if self.end == "first_exhausted":
            return min(end for end in ends if end is not None)
        for name, length, end in zip(self.names, self.lengths, ends, strict=True):
            if end is None:
                taken = self._spans[-1].before[self.names.index(name)]
                raise ValueError(
                    f'end="all_exhausted" needs every source to be exhausted, and {name!r} gives {taken} of its '
                    f"{length} rows before its weight stays 0; give it a weight in the last stage, or use "
                    'end="first_exhausted"'
                )
        return max(end for end in ends if end is not None)

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """The row index of the first row of each source, and the number of all rows."""
        return tuple(itertools.accumulate(self.lengths, initial=0))

    def rows_at(self, epoch: int, positions: Indices | range) -> Indices:
        """The row index at each position of an epoch.

        Args:
          epoch: each source goes on where the epoch before left it.
          positions: int64[k] in [0, rows), ascending; or a range of step 1, which takes a third of the time.

        Returns:
          int64[k], a new array.

        Raises:
          IndexError: a position is not in [0, rows).
        """
        rows = np.empty(len(positions), np.int64)
        if isinstance(positions, range):
            for source, here, stretch in self._stretches(epoch, positions):
                rows[here] = self._rows_of(source, stretch)
            return rows
        sources, counters = self._counters(epoch, positions)
        for source in range(len(self.names)):
            here = np.flatnonzero(sources == source)
            if len(here):
                rows[here] = self._rows_of(source, counters[here])
        return rows

    def epochs_at(self, epoch: int, positions: Indices) -> Indices:
        """The epoch of its own source that stands at each position, ascending, of an epoch of the mixture."""
        sources, counters = self._counters(epoch, positions)
        counters //= np.array(self.lengths)[sources]
        return counters

    def taken(self, position: int) -> tuple[int, ...]:
        """How many rows of each source stand before a position of an epoch."""
        (span,) = [span for span in self._spans if span.first <= position][-1:]
        return span.taken(position)

    def epochs_of(self, epoch: int, position: int) -> dict[str, float]:
        """How many epochs of each source stand before a position of an epoch."""
        rows = map(sum, zip(self._before(epoch), self.taken(position), strict=True))
        return {name: row / length for name, row, length in zip(self.names, rows, self.lengths, strict=True)}

    def source_of(self, row: int) -> tuple[int, int]:
        """The first row index of the source of a row, and the number of rows of that source."""
        source = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return self.firsts[source], self.lengths[source]

    def as_json(self) -> dict[str, Any]:
        """JSON values, for a fingerprint. Weights are rows of a block; sources of weight 0 are left out."""
        return {
            "seed": self.seed,
            "end": self.end,
            "orders": {n: dataclasses.asdict(order) for n, order in zip(self.names, self.orders, strict=True)},
            "stages": [
                [stage.start, {name: count for name, count in zip(self.names, stage.counts, strict=True) if count}]
                for stage in self.stages
            ],
        }

    @functools.cached_property
    def _spans(self) -> tuple[_Span, ...]:
        spans: list[_Span] = []
        before = (0,) * len(self.lengths)
        for stage, stop in zip(self.stages, [*(stage.start for stage in self.stages[1:]), ENDLESS], strict=True):
            spans.append(_Span(stage.start, stop, before, places_of(stage.counts)))
            before = spans[-1].taken(stop)
        return tuple(spans)

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

    def _stretches(self, epoch: int, positions: range) -> Iterator[tuple[int, Indices, range]]:
        """(source, which of the positions are its rows, their counters) for each source, stretch by stretch."""
        self._check(positions.start, positions.stop - 1)
        before = self._before(epoch)
        for span in self._spans:
            first, stop = max(positions.start, span.first), min(positions.stop, span.stop)
            while first < stop:
                number, inside = divmod(first - span.first, span.places.size)
                end = min(stop, first + span.places.size - inside)
                for source, places in enumerate(span.places.of_source):
                    low, high = np.searchsorted(places, [inside, inside + end - first]).tolist()
                    if low < high:
                        counter = before[source] + span.before[source] + number * len(places) + low
                        here = places[low:high] + (first - positions.start - inside)
                        yield source, here, range(counter, counter + high - low)
                first = end

    def _counters(self, epoch: int, positions: Indices) -> tuple[NDArray[np.int32], Indices]:
        """The source at each of these positions, and how many rows of it come before that one in the whole run."""
        sources, counters = np.empty(len(positions), np.int32), np.empty(len(positions), np.int64)
        if not len(positions):
            return sources, counters
        self._check(int(positions[0]), int(positions[-1]))
        before = self._before(epoch)
        for span in self._spans:
            here = slice(*np.searchsorted(positions, [span.first, span.stop]).tolist())
            inside = positions[here] - span.first
            number = inside // span.places.size
            inside -= number * span.places.size
            sources[here] = span.places.source[inside]
            number *= span.places.step[inside]
            number += span.places.rank[inside]
            number += np.add(before, span.before)[sources[here]]
            counters[here] = number
        return sources, counters

    def _check(self, first: int, last: int) -> None:
        if first < 0 or last >= self.rows:
            raise IndexError(f"positions must be in [0, {self.rows}), got {first} to {last}")

    def _rows_of(self, source: int, counters: Indices | range) -> Indices:
        """The row index of each of these rows of a source. The counters ascend."""
        order, length = self.orders[source], self.lengths[source]
        first, last = int(counters[0]) // length, int(counters[-1]) // length
        if first == last:  # the usual case: all of one epoch
            start = first * length
            own = (
                range(counters.start - start, counters.stop - start)
                if isinstance(counters, range)
                else counters - start
            )
            rows = rows_at(order, length, first, own)
        else:
            epochs, rows = np.divmod(counters, length)
            cuts = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(counters)]
            for start, stop in itertools.pairwise(cuts if order.shuffle and length > 1 else ()):
                rows[start:stop] = rows_at(order, length, int(epochs[start]), rows[start:stop])
        rows += self.firsts[source]
        return rows

    def _after_row(self, source: int, row: int) -> int | None:
        """The position after row number `row` of a source; None: the source does not give so many."""
        for span in self._spans:
            places = span.places.of_source[source]
            if len(places) and row < span.taken(span.stop)[source]:
                number, rank = divmod(row - span.before[source], len(places))
                return span.first + number * span.places.size + int(places[rank]) + 1
        return None


class _Span(NamedTuple):
    """A stage: positions `first` to `stop`, and how many rows of each source stand before it."""

    first: int
    stop: int
    before: tuple[int, ...]
    places: Places

    def taken(self, position: int) -> tuple[int, ...]:
        """How many rows of each source stand before a position of this span, or before its end."""
        number, rest = divmod(position - self.first, self.places.size)
        return tuple(
            before + number * len(places) + int(np.searchsorted(places, rest))
            for before, places in zip(self.before, self.places.of_source, strict=True)
        )


def seed_of_source(seed: int, source: int) -> int:
    """The seed of the order of source number `source` in a mixture with this seed."""
    return int(words("mixture", seed, source)[0])
