"""Combines what a case returned in each of several processes to one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a global array on one process's devices, each with its index."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: list[tuple[tuple[slice, ...], Array]]

    @classmethod
    def of(cls, array: jax.Array) -> Shards:
        parts = [(shard.index, np.array(shard.data)) for shard in array.addressable_shards]
        return cls(array.shape, np.dtype(array.dtype), parts)


@dataclasses.dataclass(frozen=True)
class PerProcess:
    """A value that may differ between the processes; combined, they are a list."""

    value: Any


@dataclasses.dataclass(frozen=True)
class CaseFailure:
    """The traceback of a case that raised."""

    traceback: str


def with_shards(value: Any) -> Any:
    """The value with each global array as the `Shards` of this process."""
    return jax.tree.map(lambda leaf: Shards.of(leaf) if isinstance(leaf, jax.Array) else leaf, value)


def combined(values: Sequence[Any]) -> Any:
    """The value that all processes returned, with global arrays made from their shards.

    Raises:
      AssertionError: a process failed, they disagree, or a part of a global array is missing.
    """
    failures = [
        f"process {i}: {value.traceback}" for i, value in enumerate(values) if isinstance(value, CaseFailure)
    ]
    assert not failures, "\n".join(failures)
    structures = [jax.tree.structure(value) for value in values]
    assert structures == structures[:1] * len(values), f"the processes returned different trees: {structures}"
    return jax.tree.map(_join, *values)


def _join(*leaves: Any) -> Any:
    if isinstance(leaves[0], PerProcess):
        return [leaf.value for leaf in leaves]
    if isinstance(leaves[0], Shards):
        return global_array(leaves)
    for leaf in leaves:
        np.testing.assert_equal(leaf, leaves[0], "the processes disagree")
    return leaves[0]


def global_array(shards: Sequence[Shards]) -> Array:
    """The global array. Its replicas must agree bit by bit, and no part of it may be missing."""
    array = np.zeros(shards[0].shape, shards[0].dtype)
    known = np.zeros(array.shape, bool)
    for one in shards:
        assert (one.shape, one.dtype) == (array.shape, array.dtype)
        for index, values in one.parts:
            np.testing.assert_array_equal(np.where(known[index], array[index], values), values, "replicas differ")
            array[index] = values
            known[index] = True
    assert known.all(), f"no process holds the values at {np.argwhere(~known).tolist()}"
    return array


def assert_same(found: Any, expected: Any) -> None:
    """Two trees are equal, to the last bit and dtype."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_array_equal(one, other, jax.tree_util.keystr(path))
