"""One leaf of variable length: values one after the other, and the offsets at which the rows begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError
from feedline._src.formats.open_options import OpenOptions
from feedline._src.rows.shards import Indices
from feedline._src.sources.arrays import ArraySource

Array = npt.NDArray[Any]
_AT_ONCE = 1 << 20
"""Rows whose offsets are validated at a time, to bound the memory."""


class RaggedLeaf:
    """The rows of one ragged leaf.

    Attributes:
      shape, dtype: of one value.
      longest: the length of the longest row, whose row index is `longest_row`.

    Args:
      name: for messages.
      given: `(values, offsets)`: arrays or paths.
      pad_to: the buckets.
      pad: the value after the end of a row.
    """

    def __init__(self, name: str, given: tuple[Any, ...], pad_to: Sequence[int], pad: float) -> None:
        if len(given) != 2:
            raise ValueError(
                f"a ragged leaf is a tuple (values, offsets), got {len(given)} elements for {name!r}; a plain "
                "column is an array or a path"
            )
        values, offsets = {name: {"values": given[0]}}, {name: {"offsets": given[1]}}
        self._name = name
        _check_offsets(name, ArraySource([offsets]))
        self._values = ArraySource([values])
        (value,) = jax.tree.leaves(self._values.spec)
        self.shape, self.dtype = value.shape, value.dtype
        self._pad = _checked_pad(name, pad, self.dtype)
        self._given_pad = np.asarray(pad).item()
        # row i of it is (offsets[i], offsets[i + 1])
        self._bounds = ArraySource([offsets], OpenOptions(window=2, stride=1))
        # a row padded to length n is the window of n values that begins with it: one copy, by the C library
        self._windows = {
            length: ArraySource([values], OpenOptions(window=length, stride=1))
            for length in pad_to
            if length <= len(self._values)
        }
        self.longest, self.longest_row = self._validated_lengths()

    def __len__(self) -> int:
        return len(self._bounds)

    @property
    def identity(self) -> list[Any]:
        """Sizes and sampled values, and the padding."""
        sampled = next(iter(self._windows.values()), self._values)
        return [sampled.identity, self._bounds.identity, self._given_pad]

    @property
    def picklable(self) -> bool:
        """Whether both arrays are paths."""
        return self._values.picklable and self._bounds.picklable

    def lengths(self, rows: Indices) -> Indices:
        """int64[k]: the length of each row."""
        return self._read_bounds(rows)[1]

    def read(self, rows: Indices, out: Array) -> Indices:
        """Write row rows[i] to out[i], padded. Returns the lengths."""
        starts, lengths = self._read_bounds(rows)
        width = out.shape[1]
        if len(long := np.flatnonzero(lengths > width)):
            row = int(rows[long[0]])
            raise RowError(
                f"a row must fit the bucket of its batch, and row {row} of {self._name!r} has length "
                f"{lengths[long[0]]}, the bucket {width}",
                stage="read",
                row=row,
            )
        if (windows := self._windows.get(width)) is None:
            self._read_values(starts, out)
        else:
            last = len(windows) - 1
            windows.read(np.minimum(starts, last), out)
            if len(late := np.flatnonzero(starts > last)):  # whose windows would end after the last value
                whole = np.empty((len(late), *out.shape[1:]), out.dtype)
                self._read_values(starts[late], whole)
                out[late] = whole
        compared = np.min_scalar_type(width)  # one or two bytes, where int64 takes as long as the rest of the read
        beyond = np.arange(width, dtype=compared) >= lengths.astype(compared)[:, None]
        np.copyto(out, self._pad, where=beyond.reshape(*beyond.shape, *[1] * len(self.shape)))
        return lengths

    def _read_values(self, starts: Indices, out: Array) -> None:
        """Write the values from starts[i] on to out[i], and the last value again after it."""
        at = np.minimum(starts[:, None] + np.arange(out.shape[1]), len(self._values) - 1)
        flat = np.empty((at.size, *self.shape), self.dtype)
        self._values.read(at.reshape(-1), flat)
        out[...] = flat.reshape(out.shape)

    def _read_bounds(self, rows: Indices) -> tuple[Indices, Indices]:
        """The start and the length of each row."""
        (spec,) = jax.tree.leaves(self._bounds.spec)
        bounds = np.empty((len(rows), 2), spec.dtype)
        self._bounds.read(rows, bounds)
        bounds = bounds.astype(np.int64)
        return bounds[:, 0], bounds[:, 1] - bounds[:, 0]

    def _validated_lengths(self) -> tuple[int, int]:
        """The length of the longest row, and its row index, after a check that the offsets ascend to the end."""
        longest, longest_row, end = -1, 0, 0
        for first in range(0, len(self), _AT_ONCE):
            starts, lengths = self._read_bounds(np.arange(first, min(first + _AT_ONCE, len(self))))
            if first == 0 and starts[0] != 0:
                raise ValueError(
                    f"offsets must begin with 0, got {starts[0]} for {self._name!r}; subtract it, and leave out "
                    "the values before it"
                )
            if len(bad := np.flatnonzero(lengths < 0)):
                raise ValueError(
                    f"offsets must not decrease, and those of {self._name!r} do at row {first + bad[0]}, from "
                    f"{starts[bad[0]]} to {starts[bad[0]] + lengths[bad[0]]}; "
                    "np.concatenate([[0], np.cumsum(lengths)]) makes them"
                )
            at = int(lengths.argmax())
            if lengths[at] > longest:
                longest, longest_row = int(lengths[at]), first + at
            end = int(starts[-1] + lengths[-1])
        if end != len(self._values):
            raise ValueError(
                f"offsets must end with the number of values, {len(self._values)}, got {end} for {self._name!r}; "
                "values or offsets may be truncated, or belong to another file"
            )
        return longest, longest_row


def _checked_pad(name: str, pad: float, dtype: np.dtype[Any]) -> Array:
    """`pad` in the dtype of the values."""
    if np.ndim(pad) or not isinstance(pad, bool | int | float | np.number | np.bool_):
        raise TypeError(f"pad must be a number, got {pad!r}; use 0")
    with np.errstate(all="ignore"):
        value = np.asarray(pad).astype(dtype)
    if dtype.kind in "biu" and value != pad:
        raise ValueError(f"pad must be a value of {dtype}, the dtype of {name!r}, got {pad!r}; use 0")
    return value


def _check_offsets(name: str, offsets: ArraySource) -> None:
    (spec,) = jax.tree.leaves(offsets.spec)
    if spec.dtype.kind not in "iu" or spec.shape:
        raise TypeError(
            f"offsets must be integers in one axis, got {spec.dtype}{[len(offsets), *spec.shape]} for {name!r}; "
            "np.concatenate([[0], np.cumsum(lengths)]) makes them"
        )
    if len(offsets) < 2:
        raise ValueError(
            f"offsets have one more element than there are rows, at least 2, got {len(offsets)} for {name!r}; "
            "they begin with 0 and end with the number of values"
        )
    if jax.tree.leaves(offsets[-1]) == [0]:
        raise ValueError(
            f"at least one row must have values, and by the offsets all {len(offsets) - 1} rows of {name!r} are "
            "empty; check what wrote them, or leave the column out"
        )
