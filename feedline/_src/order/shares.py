"""Which source of a mixture stands at a position, and how many of its rows stand before. Pure.

Positions are divided into *blocks*, which all hold the same number of rows of each source, at the same places. So
a division and a table of places answer both questions.

Places are given by Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980): of k sources, let
share i be counts[i] ÷ the rows of a block. Row r of source i, from r = 0, may be placed at place n, from n = 1,
once share · n ≥ r + δ, and must be placed while share · n ≤ r + 1 − δ. Each place takes, of the rows that may be
placed there, the one with the earliest deadline. With δ = 1 / (2k − 2) no deadline is missed, so for every i and n

    |rows of source i at the first n places − share · n| ≤ 1 − δ.

No smaller bound holds for all shares. A window is the difference of two beginnings, so any window of m places
holds share · m rows of each source to within 2 − 2δ: to within one row with two sources, less than two with more.

To within less than one row for every window is impossible with three or more sources, except for special shares.
If all shares differ, only those like 4 : 2 : 1 allow it (Fraenkel's conjecture; proven for up to seven sources).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline._src.order.schedule import ENDLESS

LARGEST_BLOCK = 1 << 16
"""Maximum rows of a block: shares are exact, or wrong by less than one row in this many."""
_LEAST_PLACES = 1 << 14
"""Small blocks are repeated in their table, so that most stretches of positions lie in one table."""
Indices = NDArray[np.int64]


def counts_of(weights: Mapping[str, float]) -> tuple[int, ...]:
    """The number of rows of each source in a block.

    The smallest block that has exactly these shares, if it has at most `LARGEST_BLOCK` rows. Otherwise a block of
    that many rows, by largest remainders: each count is within one row of its share.

    Args:
      weights: at least 0, one of them above 0. A float stands for the decimal number that it prints as.

    Raises:
      ValueError: a share is so small that a block has no row of it.

    Example:
      >>> counts_of({"web": 0.7, "code": 0.2, "books": 0.1})
      (7, 2, 1)
    """
    exact = [Fraction(str(weight)) for weight in weights.values()]
    shares = [weight / sum(exact) for weight in exact]
    near = [share.limit_denominator(LARGEST_BLOCK) for share in shares]
    block = int(np.lcm.reduce([share.denominator for share in near], dtype=object))
    alike = all(abs(a - b) < Fraction(1, 10**12) for a, b in zip(shares, near, strict=True))
    if alike and sum(near) == 1 and block <= LARGEST_BLOCK:
        return tuple(int(share * block) for share in near)
    for name, share in zip(weights, shares, strict=True):
        if 0 < share * LARGEST_BLOCK < 1:
            raise ValueError(
                f"a share must be 0, or at least one row in {LARGEST_BLOCK:,}, and that of {name!r} is "
                f"{float(share):.3g}; raise its weight, or leave it out"
            )
    counts = [int(share * LARGEST_BLOCK) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i] * LARGEST_BLOCK)
    for i in by_remainder[: LARGEST_BLOCK - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def arranged(counts: Sequence[int]) -> list[int]:
    """The source at each place of a block with these counts, by the rule above.

    Example:
      >>> arranged([3, 1])
      [0, 0, 1, 0]
    """
    total = sum(counts)
    margin = max(1, 2 * sum(count > 0 for count in counts) - 2)  # 1 / δ
    common = math.lcm(*filter(None, counts))
    # each row as (the first place that may have it, its deadline times margin · common ÷ total, its source)
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
      rank: int64[size], how many rows of that source stand before the place.
      of_source: the places of each source, ascending.
    """

    source: NDArray[np.int32]
    rank: Indices
    of_source: tuple[Indices, ...]

    @property
    def size(self) -> int:
        """The number of places."""
        return len(self.source)


@functools.lru_cache(maxsize=64)
def table_of(counts: tuple[int, ...]) -> Table:
    """The table of a block with these counts, or of several blocks."""
    block = np.array(arranged(counts), np.int32)
    source = np.tile(block, max(1, _LEAST_PLACES // len(block)))
    of_source = tuple(np.flatnonzero(source == i) for i in range(len(counts)))
    rank = np.empty(len(source), np.int64)
    for places in of_source:
        rank[places] = np.arange(len(places))
    return Table(source, rank, of_source)


@functools.lru_cache(maxsize=1 << 14)
def _taken(counts: tuple[int, ...], positions: int) -> tuple[int, ...]:
    """How many rows of each source the first positions of a phase hold.

    Cached for more phases than `table_of`, since weights may be set anew after every step.
    """
    table = table_of(counts)
    number, rest = divmod(positions, table.size)
    return tuple(number * len(places) + int(np.searchsorted(places, rest)) for places in table.of_source)


class Phase(NamedTuple):
    """From position `start` on, each block holds `counts[i]` rows of source i."""

    start: int
    counts: tuple[int, ...]


class Span(NamedTuple):
    """The positions of a phase, `start` to `stop`, and how many rows of each source stand before it."""

    start: int
    stop: int
    before: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def table(self) -> Table:
        """Not held, since a run may have many phases, most of which are over."""
        return table_of(self.counts)

    def taken(self, position: int) -> tuple[int, ...]:
        """How many rows of each source stand before a position of this span, or before its end."""
        taken = _taken(self.counts, position - self.start)
        return tuple(before + more for before, more in zip(self.before, taken, strict=True))

    def counters(self, positions: Indices) -> tuple[NDArray[np.int32], Indices]:
        """The source at each of these positions of this span, and how many of its rows stand before that one."""
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
