"""Computes which row is at which position of a mixture, as a pure function of (seed, epoch, position).

Let c be the number of rows that were taken from a source before, over all epochs of the mixture. Then, in the
source's own order, its next row has epoch c div length and position c mod length (length: the source's rows).

*Shares.* Positions are divided into *blocks*. A *place* is an offset in a block, and has the same source in all
blocks. So a division and a table give the source at a position, and how many rows of this source precede it.

Rows get places as in Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980). The share of
source i is counts[i] ÷ the rows of a block. Row r of source i (r ≥ 0) may get the n-th place (n ≥ 1) if
share · n ≥ r + δ. Its deadline is the last n with share · n ≤ r + 1 − δ. Each place goes to the row with the
earliest deadline among the rows that may get it. With k sources and δ = 1 / (2k − 2), no row misses its deadline,
so for all i and n

    |rows of source i at the first n places − share · n| ≤ 1 − δ.

No smaller bound holds for all shares. A window of m places consists of the first n + m places except the first n.
So its number of rows of each source differs from share · m by at most 2 − 2δ: by one row with two sources, by less
than two rows with more sources.

With three or more sources, only special shares allow a bound below one row for every window. If all shares differ,
they must be like 4 : 2 : 1 (Fraenkel's conjecture, which is proven for up to seven sources).
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from feedline._src.native.gather import rows_at_positions
from feedline._src.native.library import library
from feedline._src.options import Order
from feedline._src.order.epoch import (
    EpochOrder,
    Positions,
    SingleOrder,
    Taken,
    as_indices,
    epoch_order,
    substitutes_at,
)
from feedline._src.order.permutation import words
from feedline._src.order.schedule import ENDLESS

End = Literal["endless", "first_exhausted", "all_exhausted"]
Indices = NDArray[np.int64]
_MIXED = 3  # the kind of an `EpochOrder`
_MAX_EPOCHS = 64  # of all sources, in one C call
_MAX_STRUCTS = 16  # in the cache
LARGEST_BLOCK = 1 << 16
"""Maximum rows of a block. Shares are exact, or off by less than one row in this many."""
_TABLE_PLACES = 1 << 14
"""A table repeats a small block up to this many places, so that most stretches of positions lie in one table."""


# --- shares: which source stands at a position ---


def counts_of(weights: Mapping[str, float]) -> tuple[int, ...]:
    """The number of rows of each source in a block.

    The block is the smallest that has exactly these shares, if it has at most `LARGEST_BLOCK` rows. Otherwise it
    has `LARGEST_BLOCK` rows, divided by largest remainders: each count is within one row of its share.

    Args:
      weights: at least 0, one of them above 0. A float stands for the decimal number that it prints as.

    Raises:
      ValueError: a share is too small for one row in a block.

    Example:
      >>> counts_of({"web": 0.7, "code": 0.2, "books": 0.1})
      (7, 2, 1)
    """
    exact = [Fraction(str(weight)) for weight in weights.values()]
    shares = [weight / sum(exact) for weight in exact]
    near = [share.limit_denominator(LARGEST_BLOCK) for share in shares]
    block = int(np.lcm.reduce([share.denominator for share in near], dtype=object))
    alike = all(  # a share above 0 is not rounded to 0
        abs(a - b) < Fraction(1, 10**12) and (a == 0) == (b == 0) for a, b in zip(shares, near, strict=True)
    )
    if alike and sum(near) == 1 and block <= LARGEST_BLOCK:
        return tuple(int(share * block) for share in near)
    for name, share in zip(weights, shares, strict=True):
        if 0 < share * LARGEST_BLOCK < 1:
            raise ValueError(
                f"a share must be 0, or at least one row in {LARGEST_BLOCK:,}, and the share of {name!r} is "
                f"{float(share):.3g}; raise its weight, or leave it out"
            )
    counts = [int(share * LARGEST_BLOCK) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * LARGEST_BLOCK)
    for i in by_remainder[: LARGEST_BLOCK - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def arranged(counts: Sequence[int]) -> list[int]:
    """The source at each place of a block with these counts, by the rule in the module's docstring.

    Example:
      >>> arranged([3, 1])
      [0, 0, 1, 0]
    """
    total = sum(counts)
    margin = max(1, 2 * sum(count > 0 for count in counts) - 2)  # 1 / δ
    common = math.lcm(*filter(None, counts))
    # for each row: (its first possible place, its deadline times margin · common ÷ total, its source)
    waiting = sorted(
        (-(-(row * margin + 1) * total // (count * margin)), ((row + 1) * margin - 1) * (common // count), i)
        for i, count in enumerate(counts)
        for row in range(count)
    )
    places, ready, released = [], list[tuple[int, int]](), 0
    for place in range(1, total + 1):
        while released < total and waiting[released][0] <= place:
            heapq.heappush(ready, waiting[released][1:])
            released += 1
        places.append(heapq.heappop(ready)[1])
    return places


class Table(NamedTuple):
    """The places of one or more adjacent blocks.

    Attributes:
      source: int32[size], the source at each place.
      rank: int64[size], how many rows of the place's source stand before the place in the table.
      of_source: the places of each source, ascending.
    """

    source: NDArray[np.int32]
    rank: Indices
    of_source: tuple[Indices, ...]

    @property
    def size(self) -> int:
        return len(self.source)


@functools.lru_cache(maxsize=64)
def table_of(counts: tuple[int, ...]) -> Table:
    """The table of one or several blocks with these counts."""
    block = np.array(arranged(counts), np.int32)
    source = np.tile(block, max(1, _TABLE_PLACES // len(block)))
    of_source = tuple(np.flatnonzero(source == i) for i in range(len(counts)))
    rank = np.empty(len(source), np.int64)
    for places in of_source:
        rank[places] = np.arange(len(places))
    return Table(source, rank, of_source)


@functools.lru_cache(maxsize=1 << 14)
def _taken(counts: tuple[int, ...], positions: int) -> tuple[int, ...]:
    """How many rows of each source stand at the first `positions` positions of a phase.

    This cache holds more phases than the cache of `table_of`, since weights may change after every step.
    """
    table = table_of(counts)
    number, rest = divmod(positions, table.size)
    return tuple(number * len(places) + int(np.searchsorted(places, rest)) for places in table.of_source)


class Phase(NamedTuple):
    """From position `start` on, each block holds `counts[i]` rows of source i."""

    start: int
    counts: tuple[int, ...]


class Span(NamedTuple):
    """The positions of a phase, `start` to `stop`, and how many rows of each source stand before `start`."""

    start: int
    stop: int
    before: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def table(self) -> Table:
        """The phase's table. It is not stored, since a mixture may have many phases, and most of them are over."""
        return table_of(self.counts)

    def taken(self, position: int) -> tuple[int, ...]:
        """How many rows of each source stand before `position`, which is in this span or is its end."""
        taken = _taken(self.counts, position - self.start)
        return tuple(before + more for before, more in zip(self.before, taken, strict=True))

    def counters(self, positions: Indices) -> tuple[NDArray[np.int32], Indices]:
        """For each position in this span: its source, and how many rows of this source stand before it."""
        table = self.table
        number, place = np.divmod(positions - self.start, table.size)
        sources = table.source[place]
        in_table = np.array([len(places) for places in table.of_source])
        return sources, np.array(self.before)[sources] + number * in_table[sources] + table.rank[place]


def spans_of(phases: Sequence[Phase]) -> tuple[Span, ...]:
    """The phases as spans, the last one without an end.

    Example:
      >>> spans = spans_of([Phase(0, (3, 1)), Phase(6, (1, 1))])
      >>> [(span.start, span.before, span.taken(span.start + 2)) for span in spans]
      [(0, (0, 0), (2, 0)), (6, (5, 1), (6, 2))]
    """
    spans: list[Span] = []
    stops = [*(phase.start for phase in phases[1:]), ENDLESS]
    for phase, stop in zip(phases, stops, strict=True):
        before = spans[-1].taken(phase.start) if spans else (0,) * len(phase.counts)
        spans.append(Span(phase.start, stop, before, phase.counts))
    return tuple(spans)


# --- the order ---


class _MixedSource(ctypes.Structure):
    """`MixedSource` of columns.c: a source of a mixture, and some epochs of its own order."""

    _fields_ = (
        ("epochs", ctypes.c_void_p),
        ("first_epoch", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("before", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("first_row", ctypes.c_uint64),
    )


class _Mixed(ctypes.Structure):
    """`Mixed` of columns.c: the positions of a phase, which repeat a table of places."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("rank", ctypes.c_void_p),
        ("places", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("sources", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


@dataclasses.dataclass(frozen=True)
class MixtureOrder:
    """The order of a mixture. Row indices number the rows of all sources, one source after the other.

    Attributes:
      names: the names of the sources.
      lengths: the rows of each source.
      orders: the order of each source.
      phases: the weights, by ascending start; the first phase starts at 0.
      end: when an epoch ends.
      seed: the seed of a transform's keys, and of the substitutes for bad rows.

    Raises:
      ValueError: `end` is unknown; or it is "all_exhausted", and a source is never exhausted.

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
        """The number of positions in an epoch; `ENDLESS` if it has no end."""
        if self.end == "endless":
            return ENDLESS
        ends = [self._exhausted_at(source) for source in range(len(self.names))]
        if self.end == "all_exhausted" and ENDLESS in ends:
            raise ValueError(
                'end="all_exhausted" needs every source to deliver each row once, but '
                f"{self.names[ends.index(ENDLESS)]!r} has weight 0 before that; give it a weight in the last "
                'phase, or use end="first_exhausted"'
            )
        return min(ends) if self.end == "first_exhausted" else max(ends)

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """The row index of the first row of each source, and, last, the number of all rows."""
        return tuple(itertools.accumulate(self.lengths, initial=0))

    @property
    def shown(self) -> MixtureOrder:
        return self

    def rows_at(self, epoch: int, positions: Positions) -> Indices:
        """The row index at each position of an epoch.

        Args:
          epoch: the epoch's number. Each source continues where it stopped in the epoch before.
          positions: integers[k] in [0, rows), or a range. Ascending positions are computed fastest.

        Returns:
          int64[k], a new array.

        Raises:
          IndexError: a position is not in [0, rows).
        """
        positions = as_indices(positions)
        if library() is not None and (struct := self.struct(epoch, positions)) is not None:
            return rows_at_positions(struct, positions)
        sources, counters = self._counters(epoch, positions)
        rows = np.empty_like(counters)
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            rows[here] = self._rows_of(source, counters[here])
        return rows

    def struct(self, epoch: int, positions: Positions) -> EpochOrder | None:
        """The parameters from which C computes the rows at these positions; None: NumPy must compute them.

        NumPy computes positions that lie in several phases, and rows from more than 64 epochs of the sources.
        """
        if not len(positions):
            return None
        first, last = self._bounds(positions)
        span, *later = self._spans_between(first, last)
        if later:
            return None
        size, of_source = span.table.size, span.table.of_source
        first_table, end_table = (first - span.start) // size, (last - span.start) // size + 1
        before = [a + b for a, b in zip(self._before(epoch), span.before, strict=True)]
        epochs = []  # for each source, its epochs that occur in these tables
        for taken, places, length in zip(before, of_source, self.lengths, strict=True):
            low, high = taken + first_table * len(places), taken + end_table * len(places)
            epochs.append(range(low // length, -(-high // length)))
        if sum(map(len, epochs)) > _MAX_EPOCHS:
            return None
        key = epoch, span.start, *epochs
        if (struct := self._structs.get(key)) is None:
            if len(self._structs) >= _MAX_STRUCTS:
                self._structs.clear()
            struct = self._structs[key] = self._new_struct(span, before, epochs)
        return struct

    def _new_struct(self, span: Span, before: Sequence[int], epochs: Sequence[range]) -> EpochOrder:
        """The struct for positions of a span. `epochs`: for each source, its epochs that occur there."""
        table, pointed_to, sources = span.table, list[Any](), []
        for source, (order, length) in enumerate(zip(self.orders, self.lengths, strict=True)):
            own, step = epochs[source], len(table.of_source[source])
            structs = [epoch_order(order, length, epoch) for epoch in own]
            array = (EpochOrder * len(structs))(*structs)
            pointed_to += [structs, array]
            address = ctypes.addressof(array)
            sources.append(
                _MixedSource(address, own.start, len(own), length, before[source], step, self.firsts[source])
            )
        array_of_sources = (_MixedSource * len(sources))(*sources)
        pointers = table.source.ctypes.data, table.rank.ctypes.data, table.size, span.start
        mixed = _Mixed(*pointers, ctypes.addressof(array_of_sources), len(sources))
        struct = EpochOrder(kind=_MIXED, n=self.rows, mixed=ctypes.addressof(mixed))
        struct.keeps_alive = (mixed, array_of_sources, table, *pointed_to)
        return struct

    @functools.cached_property
    def _structs(self) -> dict[Any, EpochOrder]:
        return {}

    def __reduce__(self) -> Any:  # leaves out cached values, which contain pointers
        return MixtureOrder, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def own_positions(self, epochs: Indices, positions: Indices) -> tuple[Indices, Indices]:
        """Map epochs and positions of the mixture to epochs and positions in the sources' own orders."""
        counters, lengths = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            sources, counters[here] = self._counters(epoch, positions[here])
            lengths[here] = np.array(self.lengths)[sources]
        return counters // lengths, counters % lengths

    def _exhausted_at(self, source: int) -> int:
        """The first position at which all rows of a source have been taken; `ENDLESS` if there is none."""
        length = self.lengths[source]
        span = self._spans[bisect.bisect_left(self._spans, length, key=lambda span: span.before[source]) - 1]
        places = span.table.of_source[source]
        if not len(places):
            return ENDLESS
        tables, last = divmod(length - 1 - span.before[source], len(places))
        return min(span.start + tables * span.table.size + int(places[last]) + 1, ENDLESS)

    def taken(self, position: int) -> tuple[int, ...]:
        """How many rows of each source stand before `position`, which is in an epoch or is its end."""
        (span,) = self._spans_between(position, position)
        return span.taken(position)

    def taken_before(self, epoch: int, position: int) -> tuple[Taken, ...]:
        """See `RowOrder`."""
        counts = [a + b for a, b in zip(self._before(epoch), self.taken(position), strict=True)]
        return tuple(
            Taken(name, first, SingleOrder(order, length), count)
            for name, first, order, length, count in zip(
                self.names, self.firsts, self.orders, self.lengths, counts, strict=False
            )
        )

    def substitutes(self, epoch: int, position: int, row: int) -> Indices:
        """Rows of the bad row's own source, so that the shares are kept."""
        source = bisect.bisect_right(self.firsts, row) - 1
        return substitutes_at(self.seed, self.lengths[source], epoch, position) + self.firsts[source]

    def as_json(self) -> dict[str, Any]:
        """JSON values, for a fingerprint. A weight is a source's number of rows in a block; 0 is left out."""
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

    def _bounds(self, positions: Positions) -> tuple[int, int]:
        """The lowest and the highest of some positions. IndexError: a position is outside of the epoch."""
        if isinstance(positions, range):
            first, last = positions[0], positions[-1]
        else:
            first, last = int(positions.min()), int(positions.max())
        if first < 0 or last >= self.rows:
            raise IndexError(f"positions must be in [0, {self.rows}), got {first} to {last}")
        return first, last

    def _spans_between(self, first: int, last: int) -> tuple[Span, ...]:
        """The spans that contain the positions `first` to `last`."""
        numbers = [
            bisect.bisect_right(self.phases, position, key=lambda phase: phase.start) for position in (first, last)
        ]
        return self._spans[numbers[0] - 1 : numbers[1]]

    def _before(self, epoch: int) -> tuple[int, ...]:
        """How many rows of each source come before an epoch."""
        if not epoch:
            return (0,) * len(self.lengths)
        of_epoch = self.taken(self.rows)
        if max(of_epoch) * (epoch + 1) >= 1 << 63:
            raise ValueError(
                f"a feed must take fewer than 2^63 rows of each source, and epoch {epoch} is too late for that; "
                "seek to an earlier epoch"
            )
        return tuple(epoch * count for count in of_epoch)

    def _counters(self, epoch: int, positions: Indices) -> tuple[NDArray[np.int32], Indices]:
        """For each position: its source, and how many rows of this source come before, over all epochs."""
        sources, counters = np.empty(len(positions), np.int32), np.empty(len(positions), np.int64)
        if len(positions):
            before = np.array(self._before(epoch))
            for span in self._spans_between(*self._bounds(positions)):
                here = np.flatnonzero((positions >= span.start) & (positions < span.stop))
                sources[here], counters[here] = span.counters(positions[here])
            counters += before[sources]
        return sources, counters

    def _rows_of(self, source: int, counters: Indices) -> Indices:
        """The row indices of rows of a source. `counters`: the numbers of the rows, counted over all epochs."""
        own = SingleOrder(self.orders[source], self.lengths[source])
        epochs, rows = np.divmod(counters, own.rows)
        cuts = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(counters)]
        for start, stop in itertools.pairwise(cuts if own.shown.shuffle and own.rows > 1 else ()):
            rows[start:stop] = own.rows_at(int(epochs[start]), rows[start:stop])
        rows += self.firsts[source]
        return rows


def seed_of_source(seed: int, source: int) -> int:
    """The seed of a source's own order, in a mixture with this seed. `source`: the source's number."""
    return int(words("mixture", seed, source)[0])
