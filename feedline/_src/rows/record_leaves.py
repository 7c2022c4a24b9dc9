"""Conversion of the leaves of records to arrays, and their copy into a batch."""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.rows.spec import Leaf, RowSpec
from feedline._src.rows.values import as_record_leaf, is_list


def write_uniform_records(records: tuple[Any, ...], spec: RowSpec, targets: list[Any], start: int) -> bool:
    """Write the records to the targets from index `start` on. False if not all have the form of `spec`.

    To flatten all records in one call is faster than one by one.
    """
    values = _leaves(records, _trees_of(spec.treedef, len(records)))
    if values is None:
        return False
    try:
        for j, (leaf, target) in enumerate(zip(spec.leaves, targets, strict=True)):
            for i, value in enumerate(values[j :: len(targets)], start):
                _write_value(value, leaf, target, i)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


@functools.lru_cache(maxsize=8)
def _trees_of(treedef: jax.tree_util.PyTreeDef, count: int) -> jax.tree_util.PyTreeDef:
    """The treedef of a tuple of `count` such trees."""
    return jax.tree_util.treedef_tuple([treedef] * count)


def _leaves(tree: Any, treedef: jax.tree_util.PyTreeDef) -> list[Any] | None:
    """The leaves of a tree that has the form `treedef`, where a list is a leaf; None if it has another form.

    JAX flattens lists unless a Python function is called for each node, which takes longer than all the rest. So
    lists are handled only if the tree has another form without this.
    """
    for is_leaf in (None, is_list):
        values, found = jax.tree_util.tree_flatten(tree, is_leaf=is_leaf)
        if found == treedef:
            return values
    return None


def write_record(record: Any, spec: RowSpec, targets: list[Any], i: int) -> None:
    """Write each leaf of a record to index i of its target.

    Raises:
      ValueError: the record's tree, shapes or dtypes are not those of `spec`, or a value in it is masked.
      TypeError: a leaf cannot become an array.
    """
    values = _leaves(record, spec.treedef)
    if values is None:
        found = jax.tree_util.tree_structure(record, is_leaf=is_list)
        raise ValueError(f"its tree is {found}, the first one's {spec.treedef}")
    for value, target, leaf in zip(values, targets, spec.leaves, strict=True):
        _write_value(value, leaf, target, i)


def _write_value(value: Any, leaf: Leaf, target: Any, i: int) -> None:
    kind = type(value)
    if (
        (kind is not np.ndarray and kind is not leaf.dtype.type)
        or value.shape != leaf.shape
        or value.dtype != leaf.dtype
    ):
        value = _fitted(value, leaf)
    target[i] = value


def _fitted(value: Any, leaf: Leaf) -> npt.NDArray[Any]:
    """A record's leaf as an array. Python numbers and lists get the dtype of the first record's leaf.

    Raises:
      ValueError: it has another shape or dtype than the first record's leaf, or a value is masked.
      TypeError: it cannot become an array.
      OverflowError: a Python number that does not fit into the dtype.
    """
    array = np.asarray(as_record_leaf(leaf.name, value))
    plain = isinstance(value, int | float | list) and np.can_cast(array.dtype, leaf.dtype, "same_kind")
    if array.shape != leaf.shape or not (plain or array.dtype == leaf.dtype):
        raise ValueError(
            f"{leaf.name} is {array.dtype}{list(array.shape)}, the first record's {leaf.dtype}{list(leaf.shape)}; "
            "crop, pad or convert in a map"
        )
    if array.dtype == leaf.dtype:
        return array
    with np.errstate(over="ignore"):  # checked below, since dtypes that are not NumPy's own do not warn
        fitted = np.asarray(value, leaf.dtype)
    if not np.isfinite(fitted[np.isfinite(array)]).all():
        raise ValueError(f"{leaf.name}: {value} does not fit {leaf.dtype}, the first record's dtype")
    return fitted


def digest_of(record: Any) -> str:
    """A digest of the bytes of a record's leaves."""
    hashed = hashlib.sha256()
    for value in jax.tree_util.tree_leaves(record):
        hashed.update(np.ascontiguousarray(value).tobytes())
    return hashed.hexdigest()[:32]


def as_arrays(record: Any) -> Any:
    """A record with arrays as its leaves. Python numbers and lists have no dtype or shape.

    Raises:
      ValueError, TypeError: a leaf cannot be an array, or a value is masked.
    """

    def converted(path: Any, value: Any) -> Any:
        return as_record_leaf(f"batch{jax.tree_util.keystr(path)}", value)

    return jax.tree_util.tree_map_with_path(converted, record, is_leaf=is_list)


def share_memory(one: Any, other: Any) -> bool:
    """Whether a leaf of one of two records is, or may lie in the memory of, a leaf of the other."""
    numbers = (int, float, complex, np.generic)
    leaves = (
        [x for x in jax.tree_util.tree_leaves(tree, is_leaf=is_list) if not isinstance(x, numbers)]
        for tree in (one, other)
    )
    pairs = itertools.product(*leaves)
    return any(a is b or np.may_share_memory(np.asarray(a), np.asarray(b)) for a, b in pairs)
