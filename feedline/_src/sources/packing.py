"""Computes which documents share a row: maps a row number and an epoch to the row's spans of tokens.

Documents of one length are interchangeable, so *lengths* are packed, not documents. Best fit decreasing (Krell et
al. 2021, arXiv 2107.02027) turns the histogram of lengths into *kinds* of rows, such as 500 rows that each have
three documents of 600 tokens and one of 248. Rows are numbered kind by kind. Documents of one length are numbered
by *rank*, and ranks are assigned to the rows in sequence. So a row number determines the ranks of the row's
documents, and an index of documents sorted by length turns a rank into the document's first token. No row has to
be computed before another.

In each epoch, a keyed permutation for each length assigns the ranks to other documents. The kinds of rows remain.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.native.library import library
from feedline._src.native.spans import Spans
from feedline._src.order.permutation import ROUNDS, feistel, words

Indices = npt.NDArray[np.int64]


def order_by_length(length: Indices) -> Indices:
    """int64[n]: the documents sorted by length; equally long ones stay in the order of the source."""
    narrow = length.astype(np.min_scalar_type(int(length.max())))  # for up to two bytes, NumPy uses a radix sort
    return np.argsort(narrow, kind="stable")


class ByLength:
    """Documents, or pieces of them, sorted by length.

    Args:
      first: int64[n], the first token of each.
      length: int64[n], 1 or more.
      order: int64[n], what `order_by_length` returns for `length`.
      seed: the seed of the permutations.

    Attributes:
      lengths: int64[c], ascending: the lengths that occur. A *length number* is an index into this array.
      begins: int64[c + 1]: where the documents of each length begin in the sorted order.
      counts: int64[c]: how many documents have each length.
    """

    def __init__(self, first: Indices, length: Indices, order: Indices, seed: int) -> None:
        ordered = length[order]
        starts = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
        self.lengths = ordered[starts]
        self.begins = np.append(starts, len(order))
        self.counts = np.diff(self.begins)
        self._first, self._seed = first[order], seed

    def first_tokens(self, length_number: Indices, rank: Indices, epoch: int | None) -> Indices:
        """int64[k]: for each i, where document rank[i] among those of length lengths[length_number[i]] begins.

        Args:
          epoch: selects a permutation of the documents of each length. None: they keep the order of the source.
        """
        if epoch is not None:
            keys = words("packed", self._seed, epoch)
            # tweaks, so that lengths with equally many documents have different permutations
            tweaks = tweaked(self.lengths[length_number], keys[-1])
            rank = permuted_each(self.counts[length_number], keys, rank, tweaks)
        return self._first[self.begins[length_number] + rank]


class Kind(NamedTuple):
    """Rows that hold documents of the same lengths.

    Attributes:
      rows: how many such rows there are.
      runs: (length number, how many documents of that length are in each row), the longest documents first.
      documents: how many documents are in each row.
    """

    rows: int
    runs: tuple[tuple[int, int], ...] = ()
    documents: int = 0


class BestFit:
    """Whole documents in rows of `length` tokens, by best fit decreasing over the histogram of lengths.

    A kind has one *place* for each document of a row; a *run* is the places for documents of one length. Both are
    numbered kind by kind.

    Args:
      first, lengths: int64[n], the first token and the length of each document; none is longer than `length`.
      most: the most documents in a row; None: any number.
      seed: the seed of the permutations.

    Attributes:
      rows: how many rows there are.
      tokens: how many tokens all rows hold.
    """

    def __init__(self, first: Indices, lengths: Indices, length: int, most: int | None, seed: int) -> None:
        documents = ByLength(first, lengths, order_by_length(lengths), seed)
        self._documents, self._seed, self.tokens = documents, seed, int(lengths.sum())
        kinds = kinds_of(documents.lengths.tolist(), documents.counts.tolist(), length, most)
        rows = np.array([kind.rows for kind in kinds])
        self._first_row = _begins(rows)  # of each kind
        self.rows = int(self._first_row[-1])
        self._first_place = _begins(np.array([kind.documents for kind in kinds]))  # of each kind
        runs = np.array([run for kind in kinds for run in kind.runs])
        self._length_number, self._each = runs[:, 0], runs[:, 1]  # of each run
        self._run = np.repeat(np.arange(len(runs)), self._each)  # of each place
        self._place_of_run = _begins(self._each)
        tokens = documents.lengths[self._length_number[self._run]]  # of each place
        self._tokens = np.add.reduceat(tokens, self._first_place[:-1])  # of one row of each kind
        # of each run, how many documents of its length are in earlier kinds: the rank of its first document in the
        # first row
        taken = self._each * np.repeat(rows, [len(kind.runs) for kind in kinds])
        by_length = np.argsort(self._length_number, kind="stable")
        self._first_rank = np.empty_like(taken)
        before = _begins(taken[by_length])[:-1]
        self._first_rank[by_length] = before - documents.begins[self._length_number[by_length]]

    def tokens_of(self, rows: Indices) -> Indices:
        """int64[k]: the tokens of each row."""
        return self._tokens_by_row[rows].astype(np.int64)

    @functools.cached_property
    def _tokens_by_row(self) -> npt.NDArray[np.int32]:
        """The tokens of each row, made lazily. To search for the kind of a row instead takes ten times as long."""
        return np.repeat(self._tokens.astype(np.int32), np.diff(self._first_row))

    def spans(self, rows: Indices, epoch: int | None) -> Spans:
        """The documents of some rows. `epoch=None`: without permutations, so rows are the same in every epoch."""
        kind = np.searchsorted(self._first_row, rows, "right") - 1
        row_in_kind = rows - self._first_row[kind]
        documents = self._first_place[kind + 1] - self._first_place[kind]
        row, in_row = _numbered(documents)
        if epoch is not None:  # draw the order inside each row
            keys = words("in row", self._seed, epoch)
            in_row = permuted_each(documents[row], keys, in_row, tweaked(rows, keys[-1])[row])
        place = self._first_place[kind[row]] + in_row
        run = self._run[place]
        rank = self._first_rank[run] + row_in_kind[row] * self._each[run] + place - self._place_of_run[run]
        number = self._length_number[run]
        return Spans(row, self._documents.first_tokens(number, rank, epoch), self._documents.lengths[number])


def kinds_of(lengths: list[int], counts: list[int], length: int, most: int | None) -> list[Kind]:
    """Kinds of rows that together hold counts[i] documents of length lengths[i]; `lengths` ascends."""
    open_kinds: dict[int, list[Kind]] = {}  # by the number of tokens that still fit
    spaces = 0  # the keys of `open_kinds` as bits: bit i is set if some kind has room for exactly i more tokens
    full: list[Kind] = []

    def keep_open(kind: Kind, space: int) -> None:
        nonlocal spaces
        open_kinds.setdefault(space, []).append(kind)
        spaces |= 1 << space

    for number in reversed(range(len(lengths))):
        size, left = lengths[number], counts[number]
        while left:
            if fitting := spaces >> size:  # the fullest kind of row that has room
                space = size + (fitting & -fitting).bit_length() - 1
                kind = open_kinds[space].pop()
                if not open_kinds[space]:
                    spaces ^= 1 << space
            else:
                space, kind = length, Kind(left)
            # best fit puts documents of this length into a row until no more fit: `each` per row
            each = min(space // size, left, left if most is None else most - kind.documents)
            rows = min(kind.rows, left // each)
            left -= rows * each
            if kind.runs and rows < kind.rows:
                keep_open(kind._replace(rows=kind.rows - rows), space)
            grown = Kind(rows, (*kind.runs, (number, each)), kind.documents + each)
            space -= each * size
            if space and grown.documents != most:
                keep_open(grown, space)
            else:
                full.append(grown)
    return full + [kind for space in sorted(open_kinds) for kind in open_kinds[space]]


class Split:
    """Documents one after the other, cut where a row ends, so that only the last row has padding.

    The lengths stay in the order of the source. In each epoch, `spans` exchanges documents of one length.

    Args:
      offsets: int64[n + 1], ascending: document i has tokens offsets[i] … offsets[i + 1] − 1. The array is kept.
      length, seed: as for `BestFit`.
    """

    def __init__(self, offsets: Indices, length: int, seed: int) -> None:
        self._offsets, self._length = offsets, length
        lengths = np.diff(offsets)
        order = order_by_length(lengths)
        self._documents = ByLength(offsets[:-1], lengths, order, seed)
        self._places = np.empty_like(order)  # the place of each document in that order
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
        first_document = np.searchsorted(self._offsets, begin, "right") - 1
        row, place = _numbered(np.searchsorted(self._offsets, end, "left") - first_document)
        document = first_document[row] + place
        starts, stops = self._offsets[document], self._offsets[document + 1]
        first = starts
        if epoch is not None:
            number = np.searchsorted(self._documents.lengths, stops - starts)
            rank = self._places[document] - self._documents.begins[number]
            first = self._documents.first_tokens(number, rank, epoch)
        skipped = np.maximum(starts, begin[row])
        return Spans(row, first + skipped - starts, np.minimum(stops, end[row]) - skipped)


def _begins(counts: Indices) -> Indices:
    """int64[k + 1]: where each of k groups begins if they follow one another, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)])


def _numbered(counts: Indices) -> tuple[Indices, Indices]:
    """Number the members of k groups of these sizes. Returns each member's group, and its number in the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - _begins(counts)[group]


def tweaked(numbers: Indices, key: np.uint64) -> npt.NDArray[np.uint32]:
    """For each number, a word that selects a permutation."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    return (mixed >> np.uint64(32)).astype(np.uint32)


def permuted_each(
    sizes: Indices, keys: Sequence[np.uint64], indices: Indices, tweaks: npt.NDArray[np.uint32]
) -> Indices:
    """int64[s]: each of `indices`, permuted. For indices[i], tweaks[i] selects a permutation of [0, sizes[i])."""
    found = np.array(indices, np.int64)
    if (compiled := library()) is not None:
        arrays = (np.ascontiguousarray(sizes), np.array(keys[:ROUNDS]), np.ascontiguousarray(tweaks), found)
        if compiled.feedline_permute(*(array.ctypes.data for array in arrays), len(found)):
            raise IndexError("an index must be below the size of its permutation")
        return found
    for size in np.unique(sizes):
        here = np.flatnonzero(sizes == size)
        found[here] = feistel(int(size), keys[:ROUNDS], found[here].view(np.uint64), tweaks[here])
    return found
