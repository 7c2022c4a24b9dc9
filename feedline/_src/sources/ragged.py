"""Rows with leaves of variable length, padded to one of a few static lengths."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError
from feedline._src.formats.open_options import OpenOptions
from feedline._src.options import checked_integer
from feedline._src.rows.shards import Indices
from feedline._src.rows.source import Source, WillRead
from feedline._src.sources.arrays import ArraySource

Array = npt.NDArray[Any]
_AT_ONCE = 1 << 20
"""Rows whose offsets are validated at a time, to bound the memory."""


class Ragged(Source):
    """Columns of which some have rows of different lengths, such as the tokens of documents.

    In a batch each of these leaves is padded to the *bucket* of the batch: the smallest of `pad_to` that holds the
    longest row of the global batch. So a jitted step is compiled once for each bucket. Every process computes the
    bucket from the rows of the whole batch. The leaf `NAME_length`, int32, has the length of each row of NAME.

    Args:
      columns: by name. A tuple `(values, offsets)` is a ragged leaf, with `values[offsets[i] : offsets[i + 1]]` as
        row i. `offsets` are integers, one more than there are rows, from 0 to `len(values)`. The path of an `.idx`
        of Megatron-LM is a ragged leaf, too: its rows are the documents of the `.bin` beside it. Any other value
        is a plain column. Each array may be the path of a `.npy` file, which is mapped.
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
        given = {name: value for name, value in columns.items() if isinstance(value, tuple) or _is_index(value)}
        plain = {name: value for name, value in columns.items() if name not in given}
        if not given:
            raise ValueError(
                "one of the columns must be a tuple (values, offsets), got none; pass plain columns to Feed itself"
            )
        if taken := next((name for name in given if f"{name}_length" in columns), None):
            raise ValueError(
                f"the lengths of {taken!r} become the leaf '{taken}_length', and columns have that key, too; "
                "rename one of the two"
            )
        self._ragged = {name: _Leaf(name, value, self.pad_to, pad) for name, value in given.items()}
        self._plain = ArraySource([plain]) if plain else None
        counts = {name: len(leaf) for name, leaf in self._ragged.items()}
        if self._plain is not None:
            counts["the plain columns"] = len(self._plain)
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ValueError(
                f"all columns must have the same number of rows, got {listed}; offsets have one more element than "
                "there are rows"
            )
        self._sources: list[_Leaf | ArraySource] = [*self._ragged.values()]
        self._sources += [] if self._plain is None else [self._plain]
        self.picklable = all(source.picklable for source in self._sources)
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

    def __len__(self) -> int:
        return len(self._sources[0])

    def padded_length(self, rows: Indices) -> int:
        """The bucket of a batch of these rows."""
        longest = max(int(leaf.bounds(rows)[1].max(initial=0)) for leaf in self._ragged.values())
        return self.pad_to[int(np.searchsorted(self.pad_to, longest))]

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`, whose ragged leaves may be shorter than in `spec`.

        Raises:
          RowError: a row is longer than `out`.
          FeedError: a file was written to or truncated, or its store cannot be read.
        """
        if self._plain is not None:
            self._plain.read(rows, {name: out[name] for name in self._plain.spec})
        for name, leaf in self._ragged.items():
            out[f"{name}_length"][:] = leaf.read(rows, out[name])

    @property
    def will_read(self) -> WillRead | None:
        """For arrays in a store until all are mapped; None for others."""
        told = [source.will_read for source in self._sources if source.will_read is not None]
        return (lambda rows, ahead: all(will_read(rows, ahead) for will_read in told)) if told else None

    def close(self) -> None:
        """Give up what is being fetched. A mapped file is unmapped with the last array that refers to it."""
        for source in self._sources:
            source.close()

    def _facts(self) -> list[tuple[str, str]]:
        return [*super()._facts(), ("pad_to", ", ".join(map(str, self.pad_to)))]


def _checked_buckets(pad_to: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(pad_to, Sequence | np.ndarray):
        raise TypeError(f"pad_to must be a sequence of integers, got {pad_to!r}; use (128, 256, 512)")
    buckets = tuple(checked_integer("each of pad_to", bucket, at_least=1) for bucket in pad_to)
    if not buckets or any(a >= b for a, b in itertools.pairwise(buckets)):
        raise ValueError(
            f"pad_to must be one or more ascending integers, got {buckets}; use "
            f"{tuple(sorted(set(buckets))) or (128, 256, 512)}"
        )
    return buckets


def _is_index(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and os.fspath(value).endswith(".idx")


def open_tokens(paths: Sequence[str], options: OpenOptions) -> tuple[ArraySource, list[Indices]]:
    """The tokens of the `.bin` of each `.idx` of Megatron-LM, and the offsets of the documents of each.

    Raises:
      ValueError: files are damaged, or do not fit together.
    """
    from feedline._src.files.files import Files
    from feedline._src.formats import megatron

    files = Files(paths, options.store)
    indices = [files.opened(number, megatron.read_index) for number in range(len(files))]
    found = {str(index.dtype) for index in indices}
    if len(found) > 1:
        raise ValueError(f"files whose rows follow each other must have tokens of one dtype, got {sorted(found)}")
    bins = Files([megatron.tokens_beside(path) for path in paths], options.store)
    for index, file in zip(indices, bins, strict=True):
        megatron.check_tokens(index, file.name, file.size)
    of_tokens = dataclasses.replace(options, dtype=indices[0].dtype)
    return ArraySource(bins.paths, of_tokens, files=bins), [index.offsets for index in indices]


class _Leaf:
    """A ragged leaf: values one after the other, and the offsets at which rows begin.

    Args:
      given: `(values, offsets)`, which are arrays or paths, or the path of an `.idx`.
    """

    def __init__(self, name: str, given: Any, pad_to: Sequence[int], pad: float) -> None:
        self._name, self._pad_to = name, pad_to
        if is_index := _is_index(given):
            self._values, (offsets,) = open_tokens([os.fspath(given)], OpenOptions())
        elif len(given) == 2:
            values, offsets = given
            self._values = ArraySource([{name: {"values": values}}])
        else:
            raise ValueError(
                f"a ragged leaf is a tuple (values, offsets), got {len(given)} elements for {name!r}; a plain "
                "column is an array or a path"
            )
        at = ArraySource([{name: {"offsets": offsets}}])
        (spec,) = jax.tree.leaves(at.spec)
        if spec.dtype.kind not in "iu" or spec.shape or len(at) < 2:
            raise TypeError(
                "offsets must be integers in one axis, one more than there are rows, at least 2, got "
                f"{spec.dtype}{[len(at), *spec.shape]} for {name!r}; np.concatenate([[0], np.cumsum(lengths)]) "
                "makes them"
            )
        self._bounds = at.windows(2, 1)  # row i of it is (offsets[i], offsets[i + 1])
        self.picklable = self._values.picklable and (is_index or at.picklable)
        (value,) = jax.tree.leaves(self._values.spec)
        self.shape, self.dtype = value.shape, value.dtype
        self._pad, self._given_pad = _checked_pad(name, pad, self.dtype), np.asarray(pad).item()
        self._windows: dict[int, ArraySource] = {}
        self._check_offsets()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_windows": {}}

    def __len__(self) -> int:
        return len(self._bounds)

    @property
    def identity(self) -> list[Any]:
        smallest = self._pad_to[0]
        sampled = self._windows_of(smallest) if smallest <= len(self._values) else self._values
        return [sampled.identity, self._bounds.identity, self._given_pad]

    @property
    def will_read(self) -> WillRead | None:
        """Fetches offsets ahead until all are mapped, and from then on values."""
        if self._bounds.will_read is not None:
            return self._bounds.will_read
        return None if self._values.will_read is None else self._fetch_ahead

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        starts, lengths = self.bounds(rows)
        windows = self._windows_of(next(n for n in self._pad_to if n >= lengths.max(initial=0)))
        return windows.will_read is None or windows.will_read(np.minimum(starts, len(windows) - 1), ahead)

    def close(self) -> None:
        self._values.close()
        self._bounds.close()

    def bounds(self, rows: Indices) -> tuple[Indices, Indices]:
        """The start and the length of each row."""
        (spec,) = jax.tree.leaves(self._bounds.spec)
        found = np.empty((len(rows), 2), spec.dtype)
        self._bounds.read(rows, found)
        starts, ends = found.astype(np.int64).T
        return starts, ends - starts

    def read(self, rows: Indices, out: Array) -> Indices:
        """Write row rows[i] to out[i], padded. Returns the lengths."""
        starts, lengths = self.bounds(rows)
        width = out.shape[1]
        if len(long := np.flatnonzero(lengths > width)):
            row = int(rows[long[0]])
            raise RowError(
                f"a row must fit the bucket of its batch, and row {row} of {self._name!r} has length "
                f"{lengths[long[0]]}, the bucket {width}",
                stage="read",
                row=row,
            )
        # a row padded to length n is the window of n values that begins with it: one copy, by the C library
        windows = self._windows_of(width)
        last = len(windows) - 1
        windows.read(np.minimum(starts, last), out[:, : len(self._values) - last])
        for i in np.flatnonzero(starts > last):  # a window that would end after the last value was read before it
            out[i, : lengths[i]] = out[i, starts[i] - last :][: lengths[i]].copy()
        compared = np.min_scalar_type(width)  # one or two bytes, where int64 takes as long as the rest of the read
        beyond = np.arange(width, dtype=compared) >= lengths.astype(compared)[:, None]
        np.copyto(out, self._pad, where=beyond.reshape(*beyond.shape, *[1] * len(self.shape)))
        return lengths

    def _windows_of(self, width: int) -> ArraySource:
        """All windows of that many values, or of all values if there are fewer."""
        length = min(width, len(self._values))
        return self._windows.get(length) or self._windows.setdefault(length, self._values.windows(length, 1))

    def _check_offsets(self) -> None:
        """Offsets ascend from 0 to the number of values, and no row is longer than the largest bucket."""
        most, end = self._pad_to[-1], 0
        for first in range(0, len(self), _AT_ONCE):
            starts, lengths = self.bounds(np.arange(first, min(first + _AT_ONCE, len(self))))
            if first == 0 and starts[0] != 0:
                raise ValueError(
                    f"offsets must begin with 0, got {starts[0]} for {self._name!r}; subtract it, and leave out "
                    "the values before it"
                )
            if len(bad := np.flatnonzero((lengths < 0) | (lengths > most))):
                row, length = first + bad[0], lengths[bad[0]]
                if length < 0:
                    raise ValueError(
                        f"offsets must not decrease, and those of {self._name!r} do at row {row}, from "
                        f"{starts[bad[0]]} to {starts[bad[0]] + length}; "
                        "np.concatenate([[0], np.cumsum(lengths)]) makes them"
                    )
                raise ValueError(
                    f"the largest bucket must hold every row, and row {row} of {self._name!r} has length "
                    f"{length}, with pad_to={tuple(self._pad_to)}; add a larger bucket, or cut the rows"
                )
            end = int(starts[-1] + lengths[-1])
        if end != len(self._values):
            raise ValueError(
                f"offsets must end with the number of values, {len(self._values)}, got {end} for {self._name!r}; "
                "values or offsets may be truncated, or belong to another file"
            )


def _checked_pad(name: str, pad: float, dtype: np.dtype[Any]) -> Array:
    """`pad` in the dtype of the values."""
    if np.ndim(pad) or not isinstance(pad, bool | int | float | np.number | np.bool_):
        raise TypeError(f"pad must be a number, got {pad!r}; use 0")
    with np.errstate(all="ignore"):
        value = np.asarray(pad).astype(dtype)
    if dtype.kind in "biu" and value != pad:
        raise ValueError(f"pad must be a value of {dtype}, the dtype of {name!r}, got {pad!r}; use 0")
    return value
