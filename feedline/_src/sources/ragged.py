"""Rows with leaves of variable length, padded to one of a few static lengths."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from feedline._src.options import checked_integer
from feedline._src.rows.indexed import IndexedSource
from feedline._src.rows.shards import Indices
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.ragged_leaf import RaggedLeaf


class Ragged(IndexedSource):
    """Columns of which some have rows of different lengths, such as the tokens of documents.

    In a batch each of these leaves is padded to the *bucket* of the batch: the smallest of `pad_to` that holds the
    longest row of the global batch. So a jitted step is compiled once for each bucket. Every process computes the
    bucket from the rows of the whole batch. The leaf `NAME_length`, int32, has the length of each row of NAME.

    Args:
      columns: by name. A tuple `(values, offsets)` is a ragged leaf, with `values[offsets[i] : offsets[i + 1]]` as
        row i. `offsets` are integers, one more than there are rows, from 0 to `len(values)`. Any other value is a
        plain column. Each array may be the path of a `.npy` file, which is mapped.
      pad_to: the buckets, ascending.
      pad: the value after the end of a row.

    Raises:
      ValueError: a row is longer than the largest bucket, or the arrays do not fit together.
      TypeError: a value has the wrong type.

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
        given = _ragged_ones(columns)
        plain = {name: value for name, value in columns.items() if name not in given}
        self._ragged = {name: RaggedLeaf(name, value, self.pad_to, pad) for name, value in given.items()}
        self._plain = ArraySource([plain]) if plain else None
        self._check_rows()
        self._check_longest()
        self.spec: dict[str, Any] = dict(self._plain.spec) if self._plain is not None else {}
        for name, leaf in self._ragged.items():
            self.spec[name] = jax.ShapeDtypeStruct((self.pad_to[-1], *leaf.shape), leaf.dtype)
            self.spec[f"{name}_length"] = jax.ShapeDtypeStruct((), np.int32)
        paths = jax.tree_util.tree_leaves_with_path(self.spec)
        self.ragged_leaves = tuple(i for i, (path, _) in enumerate(paths) if path[0].key in self._ragged)

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled values of every array, the buckets and the padding."""
        return {
            "kind": "ragged",
            "pad_to": list(self.pad_to),
            "ragged": {name: leaf.identity for name, leaf in self._ragged.items()},
            "plain": None if self._plain is None else self._plain.identity,
        }

    @property
    def picklable(self) -> bool:
        """Whether worker processes can open it again, because every array is a path."""
        return all(leaf.picklable for leaf in self._ragged.values()) and (
            self._plain is None or self._plain.picklable
        )

    def __len__(self) -> int:
        return len(next(iter(self._ragged.values())))

    def padded_length(self, rows: Indices) -> int:
        """The bucket of a batch of these rows."""
        longest = max(int(leaf.lengths(rows).max(initial=0)) for leaf in self._ragged.values())
        return self.pad_to[int(np.searchsorted(self.pad_to, longest))]

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`, whose ragged leaves may be shorter than in `spec`.

        Raises:
          RowError: a row is longer than `out`.
          FeedError: a file was written to or truncated.
        """
        if self._plain is not None:
            self._plain.read(rows, {name: out[name] for name in self._plain.spec})
        for name, leaf in self._ragged.items():
            out[f"{name}_length"][:] = leaf.read(rows, out[name])

    def close(self) -> None:
        """Do nothing: a mapped file is unmapped with the last array that refers to it."""

    def _facts(self) -> list[tuple[str, str]]:
        return [*super()._facts(), ("pad_to", ", ".join(map(str, self.pad_to)))]

    def _check_rows(self) -> None:
        """Refuse columns of different numbers of rows."""
        counts = {name: len(leaf) for name, leaf in self._ragged.items()}
        if self._plain is not None:
            counts["the plain columns"] = len(self._plain)
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ValueError(
                f"all columns must have the same number of rows, got {listed}; offsets have one more element than "
                "there are rows"
            )

    def _check_longest(self) -> None:
        """Refuse a row that no bucket holds."""
        for name, leaf in self._ragged.items():
            if leaf.longest > self.pad_to[-1]:
                raise ValueError(
                    f"the largest bucket must hold every row, and row {leaf.longest_row} of {name!r} has length "
                    f"{leaf.longest}, with pad_to={self.pad_to}; add a bucket of {leaf.longest} or more, or cut "
                    "the rows"
                )


def _checked_buckets(pad_to: Sequence[int]) -> tuple[int, ...]:
    try:
        buckets = tuple(pad_to)
    except TypeError:
        raise TypeError(f"pad_to must be a sequence of integers, got {pad_to!r}; use (128, 256, 512)") from None
    buckets = tuple(checked_integer("each of pad_to", bucket, at_least=1) for bucket in buckets)
    if not buckets or any(a >= b for a, b in itertools.pairwise(buckets)):
        raise ValueError(
            f"pad_to must be one or more ascending integers, got {buckets}; use "
            f"{tuple(sorted(set(buckets))) or (128, 256, 512)}"
        )
    return buckets


def _ragged_ones(columns: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The columns that are ragged leaves."""
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"columns must be a dict with string keys, got {columns!r}")
    ragged = {name: value for name, value in columns.items() if isinstance(value, tuple)}
    if not ragged:
        raise ValueError(
            "one of the columns must be a tuple (values, offsets), got none; pass plain columns to Feed itself"
        )
    for name in ragged:
        if f"{name}_length" in columns:
            raise ValueError(
                f"the lengths of {name!r} become the leaf '{name}_length', and columns have that key, too; "
                "rename one of the two"
            )
    return ragged
