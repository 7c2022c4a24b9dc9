"""Rows with leaves of variable length, which are padded to one of a few static lengths."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError
from feedline._src.options import MAX_COUNT, checked_integer
from feedline._src.rows.shards import Indices
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.documents import Documents, DocumentSource, is_documents, open_documents

Array = npt.NDArray[Any]
_TOKENS = "tokens"


class Ragged(DocumentSource):
    """Columns, at least one of them with rows of different lengths, such as the tokens of documents.

    In a batch, each ragged leaf is padded to the *bucket* of the batch: the smallest of `pad_to` that holds the
    longest row of the global batch. So a jitted step is compiled once for each bucket. Every process computes the
    bucket from the rows of the whole batch. The leaf `NAME_length`, int32, has the length of each row of NAME.

    Args:
      columns: by name. A tuple `(values, offsets)` is a ragged leaf, with `values[offsets[i] : offsets[i + 1]]` as
        row i. `offsets` are integers, one for each row and one for the end, ascending from 0 to at most
        `len(values)`; they are held in memory, 8 bytes per row. A `pyarrow` column of lists is a ragged leaf, too.
        So is the path of an `.idx` file of Megatron-LM, or a glob or a list of such paths; its rows are the
        documents in the `.bin` beside each `.idx`. Any other value is a plain column. Each array may be the path
        of a `.npy` file, which is mapped.
      pad_to: the buckets, ascending.
      pad: the value after the end of a row.

    Raises:
      ValueError: a row is longer than the largest bucket, the arrays do not fit together, or a file is damaged.
      TypeError: a value has the wrong type.
      FileNotFoundError: there is no such file.

    Example:
      >>> documents = Ragged({"tokens": (np.arange(6), np.array([0, 1, 1, 6]))}, pad_to=(2, 5), pad=-1)
      >>> {name: value.tolist() for name, value in documents[0].items()}
      {'tokens': [0, -1, -1, -1, -1], 'tokens_length': 1}
      >>> documents.padded_length(np.array([1, 0])), documents.padded_length(np.array([1, 2]))
      (2, 5)
    """

    def __init__(
        self, columns: Mapping[str, Any], pad_to: Sequence[int] = (128, 256, 512), pad: float = 0
    ) -> None:
        self.pad_to = _checked_buckets(pad_to)
        if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
            raise TypeError(f"columns must be a dict with string keys, got {columns!r}")
        plain = {name: value for name, value in columns.items() if not is_documents(value)}
        self._ragged = {name: open_documents(name, columns[name]) for name in columns if name not in plain}
        self._plain = ArraySource([plain]) if plain else None
        if not self._ragged:
            raise ValueError(
                "one of the columns must be a tuple (values, offsets), got none; pass plain columns to Feed itself"
            )
        if taken := next((name for name in self._ragged if f"{name}_length" in columns), None):
            raise ValueError(
                f"the lengths of {taken!r} become the leaf '{taken}_length', and columns have that key, too; "
                "rename one of the two"
            )
        counts = {name: len(leaf.offsets) - 1 for name, leaf in self._ragged.items()}
        if self._plain is not None:
            counts["the plain columns"] = len(self._plain)
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ValueError(
                f"all columns must have the same number of rows, got {listed}; offsets have one more element than "
                "there are rows"
            )
        self._rows = next(iter(counts.values()))
        self._arrays = [leaf.values for leaf in self._ragged.values()]
        self._arrays += [] if self._plain is None else [self._plain]
        self.picklable = all(source.picklable for source in self._arrays)
        self.spec: dict[str, Any] = dict(self._plain.spec) if self._plain is not None else {}
        for name, leaf in self._ragged.items():
            self._check_longest(name, np.diff(leaf.offsets))
            _check_pad(name, pad, leaf.spec.dtype)
            self.spec[name] = jax.ShapeDtypeStruct((self.pad_to[-1], *leaf.spec.shape), leaf.spec.dtype)
            self.spec[f"{name}_length"] = jax.ShapeDtypeStruct((), np.int32)
        self._pad = np.asarray(pad).item()
        paths = jax.tree_util.tree_leaves_with_path(self.spec)
        self.ragged_leaves = tuple(i for i, (path, _) in enumerate(paths) if path[0].key in self._ragged)

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled values of every array, a digest of the offsets, the buckets and the padding."""
        return {
            "kind": "ragged",
            "pad_to": list(self.pad_to),
            "pad": self._pad,
            "ragged": {name: [leaf.values.identity, leaf.digest] for name, leaf in self._ragged.items()},
            "plain": None if self._plain is None else self._plain.identity,
        }

    def __len__(self) -> int:
        return self._rows

    def tokens_of(self, rows: Indices) -> Indices:
        """The lengths of these rows in the ragged leaf "tokens"; if there is none, in the first ragged leaf."""
        leaf = self._ragged.get(_TOKENS) or next(iter(self._ragged.values()))
        return leaf.lengths(rows)

    def padded_length(self, rows: Indices) -> int:
        """The bucket of a batch of these rows."""
        longest = max(int(leaf.lengths(rows).max(initial=0)) for leaf in self._ragged.values())
        return self.pad_to[int(np.searchsorted(self.pad_to, longest))]

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`, whose ragged leaves may be shorter than in `spec`.

        Raises:
          RowError: a row is longer than `out`.
          FeedError: a file was written to or truncated, or its store cannot be read.
        """
        self.check_range(rows)
        if self._plain is not None:
            self._plain.read(rows, {name: out[name] for name in self._plain.spec})
        for name, leaf in self._ragged.items():
            out[f"{name}_length"][:] = self._read_ragged(name, leaf, rows, out[name])

    def _read_ragged(self, name: str, leaf: Documents, rows: Indices, out: Array) -> Indices:
        """Write row rows[i] to out[i], padded. Returns the lengths of the rows."""
        lengths, width = leaf.lengths(rows), out.shape[1]
        if len(long := np.flatnonzero(lengths > width)):
            row = int(rows[long[0]])
            raise RowError(
                f"a row must fit the bucket of its batch, and row {row} of {name!r} has length "
                f"{lengths[long[0]]}, the bucket {width}",
                stage="read",
                row=row,
            )
        leaf.values.read_spans(leaf.spans(rows), out)  # writes zeros after the end of a row
        if self._pad:
            narrow = np.min_scalar_type(width)  # with int64, this would take as long as the rest of the read
            beyond = np.arange(width, dtype=narrow) >= lengths.astype(narrow)[:, None]
            np.copyto(out, self._pad, where=beyond.reshape(*beyond.shape, *[1] * (out.ndim - 2)), casting="unsafe")
        else:
            out[lengths == 0] = 0
        return lengths

    def _will_read(self, rows: Indices, ahead: int) -> bool:
        fetched = [leaf.values.will_read_spans(leaf.spans(rows), ahead) for leaf in self._ragged.values()]
        if self._plain is not None and (will_read := self._plain.will_read) is not None:
            fetched.append(will_read(rows, ahead))
        return all(fetched)

    def _facts(self) -> list[tuple[str, str]]:
        return [*super()._facts(), ("pad_to", ", ".join(map(str, self.pad_to)))]

    def _check_longest(self, name: str, lengths: Indices) -> None:
        row = int(lengths.argmax())
        if lengths[row] > self.pad_to[-1]:
            raise ValueError(
                f"the largest bucket must hold every row, and row {row} of {name!r} has length {lengths[row]}, "
                f"with pad_to={self.pad_to}; add a larger bucket, or cut the rows"
            )


def _checked_buckets(pad_to: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(pad_to, Sequence | np.ndarray):
        raise TypeError(f"pad_to must be a sequence of integers, got {pad_to!r}; use (128, 256, 512)")
    buckets = tuple(checked_integer("each of pad_to", each, at_least=1, at_most=MAX_COUNT) for each in pad_to)
    if not buckets or any(a >= b for a, b in itertools.pairwise(buckets)):
        raise ValueError(
            f"pad_to must be one or more ascending integers, got {buckets}; use "
            f"{tuple(sorted(set(buckets))) or (128, 256, 512)}"
        )
    return buckets


def _check_pad(name: str, pad: Any, dtype: np.dtype[Any]) -> None:
    if not isinstance(pad, bool | int | float | np.number | np.bool_):
        raise TypeError(f"pad must be a number, got {pad!r}; use 0")
    given = np.asarray(pad)  # dtype object, if `pad` is an integer of more than 64 bits
    with np.errstate(all="ignore"):
        fits = given.dtype != object and given.astype(dtype) == pad
    if dtype.kind in "biu" and not fits:
        raise ValueError(f"pad must be a value of {dtype}, the dtype of {name!r}, got {pad!r}; use 0")
