"""The phases of a mixture: which source stands at a position, and how many of its rows stand before. Pure.

The sources stand at the same places of every block (see `apportionment`), so a division and a table answer both.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline._src.order.apportionment import arranged

ENDLESS = sys.maxsize
"""The position after the last phase, and the rows of an epoch without an end, as in Grain's `repeat`."""
_LEAST_PLACES = 1 << 14
"""Small blocks are held many times over, so that most stretches of positions lie in one table."""
Indices = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Phase:
    """From position `start` on, each block holds `counts[i]` rows of source i."""

    start: int
    counts: tuple[int, ...]


class Places(NamedTuple):
    """The places of one or more adjacent blocks.

    Attributes:
      source: int32[size], the source at each place.
      rank: int64[size], how many rows of that source stand before the place.
      step: int64[size], how many stand at all places.
      of_source: the places of each source, ascending.
    """

    source: NDArray[np.int32]
    rank: Indices
    step: Indices
    of_source: tuple[Indices, ...]

    @property
    def size(self) -> int:
        """The number of places."""
        return len(self.source)


class Span(NamedTuple):
    """A phase: positions `first` to `stop`, and how many rows of each source stand before it."""

    first: int
    stop: int
    before: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def places(self) -> Places:
        """Not held, for a run may have many phases, of which most are over."""
        return places_of(self.counts)

    def taken(self, position: int) -> tuple[int, ...]:
        """How many rows of each source stand before a position of this span, or before its end."""
        number, rest = divmod(position - self.first, self.places.size)
        return tuple(
            before + number * len(places) + int(np.searchsorted(places, rest))
            for before, places in zip(self.before, self.places.of_source, strict=True)
        )

    def counters(self, positions: Indices) -> tuple[NDArray[np.int32], Indices]:
        """The source at each of these positions of this span, and how many of its rows stand before that one."""
        inside = positions - self.first
        number = inside // self.places.size
        inside -= number * self.places.size
        sources = self.places.source[inside]
        number *= self.places.step[inside]
        number += self.places.rank[inside]
        number += np.array(self.before)[sources]
        return sources, number

    def after_row(self, source: int, row: int) -> int | None:
        """The position after row number `row` of a source; None: it stands in no place of this span."""
        places = self.places.of_source[source]
        if not len(places) or not self.before[source] <= row < self.taken(self.stop)[source]:
            return None
        number, rank = divmod(row - self.before[source], len(places))
        return self.first + number * self.places.size + int(places[rank]) + 1


def spans_of(phases: Sequence[Phase]) -> tuple[Span, ...]:
    """The phases as spans, the last one without an end.

    Example:
      >>> spans = spans_of([Phase(0, (3, 1)), Phase(6, (1, 1))])
      >>> [(span.first, span.before, span.taken(span.first + 2)) for span in spans]
      [(0, (0, 0), (2, 0)), (6, (5, 1), (6, 2))]
    """
    spans: list[Span] = []
    before = (0,) * len(phases[0].counts)
    for phase, stop in zip(phases, [*(phase.start for phase in phases[1:]), ENDLESS], strict=True):
        spans.append(Span(phase.start, stop, before, phase.counts))
        if stop != ENDLESS:
            of_phase = _taken(phase.counts, stop - phase.start)
            before = tuple(a + b for a, b in zip(before, of_phase, strict=True))
    return tuple(spans)


@functools.lru_cache(maxsize=1 << 14)
def _taken(counts: tuple[int, ...], positions: int) -> tuple[int, ...]:
    """How many rows of each source the first positions of a phase hold; kept, as tables of many phases are not."""
    return Span(0, positions, (0,) * len(counts), counts).taken(positions)


@functools.lru_cache(maxsize=64)
def places_of(counts: tuple[int, ...]) -> Places:
    """The table of a block with so many rows of each source, or of several blocks."""
    block = np.array(arranged(counts), np.int32)
    source = np.tile(block, max(1, _LEAST_PLACES // len(block)))
    of_source = tuple(np.flatnonzero(source == i) for i in range(len(counts)))
    rank = np.empty(len(source), np.int64)
    for places in of_source:
        rank[places] = np.arange(len(places))
    return Places(source, rank, np.array([len(places) for places in of_source])[source], of_source)
