"""Which documents share a row, as arithmetic: from a row number and an epoch to spans of tokens.

Documents of one length are alike, so *lengths* are packed, not documents: the histogram of lengths gives *kinds*
of rows ("so many rows of three documents of 600 tokens and one of 248"), by best fit decreasing (Krell et al.
2021, arXiv 2107.02027). Rows are numbered kind by kind. Each row takes the next documents of the lengths that its
kind has, by their rank among documents of that length, and an index of documents sorted by length turns a rank
into the place of its tokens. So every row is found without those before it: that is random access.

In each epoch a keyed permutation of the documents of each length deals them out anew, into the same kinds of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from feedline._src.native.library import library
from feedline._src.native.spans import Spans
from feedline._src.order.permutation import ROUNDS, feistel, words

Indices = npt.NDArray[np.int64]


def order_by_length(length: Indices) -> Indices:
    """int64[n]: the documents in the order of their lengths, those of one length in the order of the source."""
    narrow = length.astype(np.min_scalar_type(int(length.max())))  # up to two bytes, this is a radix sort
    return np.argsort(narrow, kind="stable")


class ByLength:
    """Documents, or pieces of them, sorted by length.

    Args:
      first: int64[n], the first token of each.
      length: int64[n], 1 or more.
      order: int64[n], what `order_by_length` gives for them.
      seed: of the permutations.

    Attributes:
      lengths: int64[c], ascending: the lengths that occur.
      counts: int64[c]: documents of each length.
      begins: int64[c + 1]: where those of each length begin in the sorted order.
    """

    def __init__(self, first: Indices, length: Indices, order: Indices, seed: int) -> None:
        if int(length.max()) <= max(len(length), 1 << 22):
            counts = np.bincount(length)
            self.lengths = np.flatnonzero(counts)
            self.counts = counts[self.lengths]
        else:
            self.lengths, self.counts = np.unique(length, return_counts=True)
        self.begins = np.concatenate([[0], np.cumsum(self.counts)])
        self._first, self._seed = first[order], seed

    def first_tokens(self, of: Indices, rank: Indices, epoch: int | None) -> Indices:
        """The first token of the documents number `rank` of the lengths number `of`.

        Args:
          epoch: deals the documents of each length out anew; None: in the order of the source.
        """
        begins = self.begins[of]
        if epoch is not None:
            keys = words("packed", self._seed, epoch)
            # lengths with equally many documents have other permutations, too
            rank = permuted_each(self.counts[of], keys, rank, tweaked(self.lengths[of], keys[-1]))
        return self._first[begins + rank]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows that are alike while lengths are packed: a linked list of what they hold."""

    count: int
    size: int = 0  # the length number `size` …
    each: int = 0  # … that many times, …
    others: _Rows | None = None  # … and what these hold
    documents: int = 0


class BestFit:
    """Whole documents in rows of `length` tokens, by best fit decreasing over the histogram of lengths.

    Args:
      first, lengths: int64[n], the first token and the length of each document; none is longer than `length`.
      most: documents a row; None: any number.
      seed: of the permutations.

    Attributes:
      rows: how many rows there are.
      tokens: in all of them.
    """

    def __init__(self, first: Indices, lengths: Indices, length: int, most: int | None, seed: int) -> None:
        documents = ByLength(first, lengths, order_by_length(lengths), seed)
        self._documents, self._seed, self.tokens = documents, seed, int(lengths.sum())
        kinds = _kinds(documents.lengths.tolist(), documents.counts.tolist(), length, most)
        runs = [list(_runs(kind)) for kind in kinds]
        counts = np.array([kind.count for kind in kinds])
        self._begins = np.concatenate([[0], np.cumsum(counts)])  # rows before each kind
        self.rows = int(self._begins[-1])
        # a run: `each` documents of one length in a row of a kind
        self._size = np.array([size for kind in runs for size, _ in kind])
        self._each = np.array([each for kind in runs for _, each in kind])
        # a slot: one document in a row of a kind
        self._run = np.repeat(np.arange(len(self._each)), self._each)  # of each slot
        self._slots = np.concatenate([[0], np.cumsum(self._each)])  # before each run
        ends = np.cumsum([len(kind) for kind in runs])
        self._first_slot = self._slots[np.concatenate([[0], ends])]  # of each kind
        self._tokens = np.add.reduceat(documents.lengths[self._size] * self._each, ends - np.diff(ends, prepend=0))
        # the documents of a length that the kinds before have taken
        taken = self._each * np.repeat(counts, np.diff(ends, prepend=0))
        by_size = np.argsort(self._size, kind="stable")
        before = np.cumsum(taken[by_size]) - taken[by_size]
        self._before = np.empty_like(before)
        self._before[by_size] = before - documents.begins[self._size[by_size]]

    def tokens_of(self, rows: Indices) -> Indices:
        """int64[k]: the tokens of each row."""
        return self._tokens_by_row[rows].astype(np.int64)

    @functools.cached_property
    def _tokens_by_row(self) -> npt.NDArray[np.int32]:
        """Made when tokens are first counted: searching the kind of each row takes ten times as long."""
        return np.repeat(self._tokens.astype(np.int32), np.diff(self._begins))

    def spans(self, rows: Indices, epoch: int | None) -> Spans:
        """The documents of some rows. `epoch` None: in every epoch the same ones, in the order of the source."""
        kind = np.searchsorted(self._begins, rows, "right") - 1
        number = rows - self._begins[kind]
        first = self._first_slot[kind]
        documents = self._first_slot[kind + 1] - first
        row = np.repeat(np.arange(len(rows)), documents)
        slot = np.arange(len(row)) - np.repeat(np.cumsum(documents) - documents, documents)
        if epoch is not None:  # their order in the row
            keys = words("in row", self._seed, epoch)
            slot = permuted_each(documents[row], keys, slot, tweaked(rows, keys[-1])[row])
        slot += first[row]
        run = self._run[slot]
        rank = self._before[run] + number[row] * self._each[run] + slot - self._slots[run]
        size = self._size[run]
        return Spans(row, self._documents.first_tokens(size, rank, epoch), self._documents.lengths[size])


def _kinds(lengths: list[int], counts: list[int], length: int, most: int | None) -> list[_Rows]:
    """Kinds of rows that hold `counts` documents of each of the ascending `lengths`."""
    open_rows: dict[int, list[_Rows]] = {}  # by the tokens that still fit
    spaces = 0  # bit i: there are open rows into which i tokens fit
    full: list[_Rows] = []
    for number in reversed(range(len(lengths))):
        size, left = lengths[number], counts[number]
        while left:
            fitting = spaces >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                rows = open_rows[space].pop()
                if not open_rows[space]:
                    spaces ^= 1 << space
            else:
                space, rows = length, _Rows(left)
            # one by one, documents of this size would all go into the same row, until it is full
            each = min(space // size, left, left if most is None else most - rows.documents)
            taken = min(rows.count, left // each)
            left -= taken * each
            if fitting and taken < rows.count:
                open_rows.setdefault(space, []).append(dataclasses.replace(rows, count=rows.count - taken))
                spaces |= 1 << space
            space -= each * size
            others = rows if rows.each else None
            grown = _Rows(taken, number, each, others, rows.documents + each)
            if space and grown.documents != most:
                open_rows.setdefault(space, []).append(grown)
                spaces |= 1 << space
            else:
                full.append(grown)
    return full + [rows for space in sorted(open_rows) for rows in open_rows[space]]


def _runs(rows: _Rows | None) -> list[tuple[int, int]]:
    """(number of a length, how often), longest first."""
    found = []
    while rows is not None:
        found.append((rows.size, rows.each))
        rows = rows.others
    return found[::-1]


class Split:
    """Documents one after the other, cut where a row ends, so that only the last row has padding.

    The lengths stand in the order of the source. With an epoch, documents of one length change places.

    Args:
      offsets: int64[n + 1], ascending: document i has the tokens offsets[i] to offsets[i + 1]. It is kept.
      length, seed: as of `BestFit`.
    """

    def __init__(self, offsets: Indices, length: int, seed: int) -> None:
        lengths = np.diff(offsets)
        order = order_by_length(lengths)
        self._documents, self._offsets, self._length = (
            ByLength(offsets[:-1], lengths, order, seed),
            offsets,
            length,
        )
        self._places = np.empty_like(order)  # of each document in that order
        self._places[order] = np.arange(len(order))
        self.tokens = int(offsets[-1] - offsets[0])
        self.rows = -(-self.tokens // length)

    def tokens_of(self, rows: Indices) -> Indices:
        """int64[k]: the tokens of each row."""
        left: Indices = self.tokens - rows * self._length
        return left.clip(max=self._length)

    def spans(self, rows: Indices, epoch: int | None) -> Spans:
        """The documents, or parts of them, of some rows."""
        begin = self._offsets[0] + rows * self._length
        end = np.minimum(begin + self._length, self._offsets[-1])
        document = np.searchsorted(self._offsets, begin, "right") - 1
        documents = np.searchsorted(self._offsets, end, "left") - document
        row = np.repeat(np.arange(len(rows)), documents)
        document = np.repeat(document - np.cumsum(documents) + documents, documents) + np.arange(len(row))
        starts, stops = self._offsets[document], self._offsets[document + 1]
        first = starts
        if epoch is not None:
            of = np.searchsorted(self._documents.lengths, stops - starts)
            rank = self._places[document] - self._documents.begins[of]
            first = self._documents.first_tokens(of, rank, epoch)
        skipped = np.maximum(starts, begin[row])
        return Spans(row, first + skipped - starts, np.minimum(stops, end[row]) - skipped)


def tweaked(numbers: Indices, key: np.uint64) -> npt.NDArray[np.uint32]:
    """A word for each number, which selects its permutation."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    return (mixed >> np.uint64(32)).astype(np.uint32)


def permuted_each(
    sizes: Indices, keys: Sequence[np.uint64], indices: Indices, tweaks: npt.NDArray[np.uint32]
) -> Indices:
    """int64[s]: for each i, where the permutation of [0, sizes[i]) that tweaks[i] selects takes indices[i]."""
    rounds = np.array(keys[:ROUNDS])
    found = np.array(indices, np.int64)
    if (compiled := library()) is not None:
        sizes, tweaks = np.ascontiguousarray(sizes), np.ascontiguousarray(tweaks)
        arrays = (sizes, rounds, tweaks, found)
        if compiled.feedline_permute(*(array.ctypes.data for array in arrays), len(found)):
            raise IndexError("an index must be below the size of its permutation")
        return found
    for size in np.unique(sizes):
        here = np.flatnonzero(sizes == size)
        found[here] = feistel(int(size), keys[:ROUNDS], found[here].view(np.uint64), tweaks[here])
    return found
