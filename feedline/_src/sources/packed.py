"""Documents packed into rows of one length, with random access."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError
from feedline._src.native.spans import Spans, mark
from feedline._src.options import MAX_COUNT, checked_integer
from feedline._src.rows.source import Rows, WillRead
from feedline._src.sources.documents import Documents, DocumentSource, Indices, open_documents
from feedline._src.sources.packing import BestFit, Split

_SEGMENTS, _POSITIONS = "segment_ids", "positions"


class Packed(DocumentSource):
    """Documents packed into rows of one length, which are shuffled, resumed and mixed like rows of any source.

    A row is a dict of arrays of `length` tokens: the given columns, `segment_ids` (the number of the token's
    document in the row, from 1; 0 is padding) and `positions` (the number of the token in its document, from 0; if
    the document is cut, in its piece).

    Which documents share a row is computed from the lengths of all documents. So nothing is packed in advance, and
    any row is read without the rows before it. With `repack`, equally long documents change places each epoch.

    Args:
      columns: a dict of columns with one value per token. Each is a tuple `(values, offsets)` of arrays or paths
        of `.npy` files, where document i is `values[offsets[i] : offsets[i + 1]]`; or the path of an `.idx` file
        of Megatron-LM, a glob or a list of such paths; or a `pyarrow` column of lists. All columns have the same
        offsets. A single column, without a dict, gets the name "tokens".
      length: tokens in a row.
      packing: "best_fit": documents stay whole. "split": documents follow one another, cut where a row ends, so
        only the last row has padding.
      longer: with "best_fit", what happens to documents of more than `length` tokens. "cut": they are cut into
        pieces of `length` tokens and a shorter one. "drop": they are left out.
      max_documents: the most documents in a row, with "best_fit"; None: any number.
      repack: whether equally long documents change places in each epoch; with "best_fit", documents change places
        inside each row, too. None: True, unless values lie in a store, because only documents that stay in their
        rows can be fetched before they are needed.
      seed: the seed for `repack`.
      dtype: the dtype of integer columns in the batch; None: the stored one. Other columns keep their dtype.

    Attributes:
      documents: how many documents there are, without empty ones.
      tokens: how many tokens the rows of an epoch hold.
      fill: tokens ÷ (rows · `length`): the share of the rows that is not padding.
      cut: how many documents `longer="cut"` has cut.
      left_out: how many documents `longer="drop"` leaves out.

    Raises:
      ValueError: the columns do not fit together, there is no token, or a file is damaged.
      TypeError: an argument has the wrong type.
      FileNotFoundError: there is no such file.

    Example:
      >>> packed = Packed({"tokens": (np.arange(10, 20), np.array([0, 3, 5, 9, 10]))}, length=5, repack=False)
      >>> len(packed), packed.fill
      (2, 1.0)
      >>> packed.documents_of(1).tolist()
      [2, 3]
      >>> {name: value.tolist() for name, value in packed[1].items()}
      {'positions': [0, 1, 2, 3, 0], 'segment_ids': [1, 1, 1, 1, 2], 'tokens': [15, 16, 17, 18, 19]}
    """

    def __init__(
        self,
        columns: Any,
        length: int,
        *,
        packing: Literal["best_fit", "split"] = "best_fit",
        longer: Literal["cut", "drop"] = "cut",
        max_documents: int | None = None,
        repack: bool | None = None,
        seed: int = 0,
        dtype: npt.DTypeLike | None = np.int32,
    ) -> None:
        self.length = length = checked_integer("length", length, at_least=1, at_most=MAX_COUNT)
        seed = checked_integer("seed", seed, at_least=0, at_most=(1 << 64) - 1)
        if max_documents is not None:
            max_documents = checked_integer("max_documents", max_documents, at_least=1)
        _check_choice("packing", packing, ("best_fit", "split"))
        _check_choice("longer", longer, ("cut", "drop"))
        if packing == "split" and (longer != "cut" or max_documents is not None):
            raise ValueError('longer and max_documents are for packing="best_fit", got "split"; leave them out')
        self._columns = _opened(columns)
        self._arrays = [column.values for column in self._columns.values()]
        self.picklable = all(values.picklable for values in self._arrays)
        in_store = any(values.is_remote for values in self._arrays)
        self.repack = self.positioned = not in_store if repack is None else repack
        self._arguments = {"length": length, "packing": packing, "longer": longer, "most": max_documents}
        self._arguments |= {"repack": self.repack, "seed": seed}
        offsets = _without_empty(self._any_column.offsets)
        self.documents, self.cut, self.left_out = len(offsets) - 1, 0, 0
        if not self.documents:
            raise ValueError("at least one document must have tokens, and all are empty; check the offsets")
        self._packing: Split | BestFit
        if packing == "split":
            self._packing = Split(offsets, length, seed)
        else:
            first, lengths, self.cut, self.left_out = _pieces(offsets, length, longer)
            if not len(first):
                raise ValueError(
                    f"at least one document must be no longer than {length}, got {self.left_out} longer ones; "
                    'pass longer="cut", or a greater length'
                )
            self._packing = BestFit(first, lengths, length, max_documents, seed)
        self.tokens = self._packing.tokens
        self.fill = self.tokens / (self._packing.rows * length)
        self.spec = {name: jax.ShapeDtypeStruct((length,), np.int32) for name in (_SEGMENTS, _POSITIONS)}
        for name, column in self._columns.items():
            stored = column.spec.dtype
            placed = stored if dtype is None or stored.kind not in "iu" else np.dtype(dtype)
            self.spec[name] = jax.ShapeDtypeStruct((length,), placed)

    @property
    def _any_column(self) -> Documents:
        return next(iter(self._columns.values()))

    def __len__(self) -> int:
        return self._packing.rows

    @property
    def identity(self) -> dict[str, Any]:
        """The sizes and sampled values of the columns, the packing's arguments, and a digest of all offsets."""
        return {
            "kind": "packed",
            **self._arguments,
            "lengths": self._any_column.digest,
            "columns": {name: column.values.identity for name, column in self._columns.items()},
        }

    def documents_of(self, row: int, epoch: int = 0) -> Indices:
        """int64[k]: the documents in a row, in order. Documents are numbered as in the columns, from 0."""
        spans = self._spans(np.array([row], np.int64), epoch)
        return np.searchsorted(self._any_column.offsets, spans.first, "right") - 1

    def tokens_of(self, rows: Indices) -> Indices:
        """See `Source`."""
        return self._packing.tokens_of(rows)

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] of epoch 0 to index i of each leaf of `out`.

        Raises:
          RowError: a value does not fit the dtype of its leaf.
          FeedError: a file was written to or truncated, or its store cannot be read.
        """
        self._read(rows, 0, out)

    def read_positioned(self, rows: Rows, out: Any) -> None:
        """Like `read`, but each row has the documents of its epoch. Raises whatever `read` raises."""
        cuts = [0, *(np.flatnonzero(np.diff(rows.epoch)) + 1).tolist(), len(rows.epoch)]
        for start, stop in itertools.pairwise(cuts):
            if start < stop:
                part = {name: leaf[start:stop] for name, leaf in out.items()}
                self._read(rows.index[start:stop], int(rows.epoch[start]), part)

    @property
    def will_read(self) -> WillRead | None:
        """Fetches documents from a store ahead of their reads. None with `repack`, which moves documents."""
        return None if self.repack else super().will_read

    def _will_read(self, rows: Indices, ahead: int) -> bool:
        spans = self._spans(rows, 0)
        return all(values.will_read_spans(spans, ahead) for values in self._arrays)

    def _spans(self, rows: Indices, epoch: int) -> Spans:
        self.check_range(rows)
        return self._packing.spans(rows, epoch if self.repack else None)

    def _read(self, rows: Indices, epoch: int, out: Any) -> None:
        spans = self._spans(rows, epoch)
        for name, column in self._columns.items():
            stored, target = column.spec.dtype, out[name]
            if stored.kind not in "iu" or np.can_cast(stored, target.dtype):
                column.values.read_spans(spans, target)
                continue
            tokens = np.empty(target.shape, stored)
            column.values.read_spans(spans, tokens)
            target[...] = tokens
            if (changed := (target != tokens).any(axis=1)).any():
                raise RowError(
                    f"a value of {name!r} does not fit {target.dtype}; pass dtype=None",
                    stage="read",
                    row=int(rows[changed.argmax()]),
                )
        mark(spans, out[_SEGMENTS], out[_POSITIONS])

    def _facts(self) -> list[tuple[str, str]]:
        more = f"{self.documents:,}, {self.tokens:,} tokens, {100 * self.fill:.2f} % of the rows filled"
        return [*super()._facts(), ("documents", more)]


def _opened(columns: Any) -> dict[str, Documents]:
    """The columns, which all have the same offsets."""
    given = columns if isinstance(columns, Mapping) else {"tokens": columns}
    if not given or not all(isinstance(name, str) for name in given):
        raise TypeError(f"columns must be a dict with string keys, of one column or more, got {columns!r}")
    if taken := {_SEGMENTS, _POSITIONS} & set(given):
        raise ValueError(
            f"feedline adds the columns {_SEGMENTS} and {_POSITIONS}, got {sorted(taken)}; rename yours"
        )
    opened = {name: open_documents(name, value) for name, value in given.items()}
    first, reference = next(iter(opened.items()))
    for name, column in opened.items():
        if shape := column.spec.shape:
            raise ValueError(f"values must have one axis, and {name!r} has the shape {shape}; flatten them")
        if not np.array_equal(column.offsets, reference.offsets):
            raise ValueError(
                f"all columns must have the same offsets, and {first!r} and {name!r} differ; write both from "
                "the same documents, without gaps, and use a second source for values that are not per token"
            )
    return {name: column._replace(offsets=reference.offsets) for name, column in opened.items()}


def _without_empty(offsets: Indices) -> Indices:
    """The offsets of the documents that have tokens; the same array if all documents have some."""
    some = offsets[1:] > offsets[:-1]
    return offsets if some.all() else np.append(offsets[:-1][some], offsets[-1])


def _pieces(offsets: Indices, length: int, longer: str) -> tuple[Indices, Indices, int, int]:
    """Cut or drop documents longer than `length`. Returns (first tokens, lengths, number cut, number dropped)."""
    first, lengths = offsets[:-1], np.diff(offsets)
    long = lengths > length
    count = int(np.count_nonzero(long))
    if not count:
        return first, lengths, 0, 0
    if longer == "drop":
        return first[~long], lengths[~long], 0, count
    pieces = -(-lengths // length)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    rest = np.repeat(lengths, pieces) - number * length
    return np.repeat(first, pieces) + number * length, np.minimum(rest, length), count, 0


def _check_choice(name: str, given: Any, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {given!r}; use {choices[0]!r}")
