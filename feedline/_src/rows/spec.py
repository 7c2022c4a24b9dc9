"""The spec of a row: names, dtypes and shapes of its leaves, and the checked cast to JAX's dtypes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a row.

    Attributes:
      name: what a user would write, such as ``batch['image']``.
      shape: the shape in one row.
      dtype: the dtype in the source.
      placed_dtype: the dtype on the mesh, JAX's canonical one (int64 becomes int32 without x64).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    placed_dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Bytes of one row, in the dtype of the source."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """The tree of a row and its leaves, in the order in which JAX flattens it."""

    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, tree: Any) -> RowSpec:
        """The spec of a tree whose leaves have a shape and a dtype.

        Raises:
          TypeError: a leaf is not an array of numbers.
        """
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        if not paths:
            raise TypeError("a row must have at least one leaf, got an empty tree")
        return cls(treedef, tuple(_leaf(f"batch{jax.tree_util.keystr(path)}", x) for path, x in paths))

    @property
    def structs(self) -> Any:
        """The tree with a `jax.ShapeDtypeStruct` for each leaf, in the dtypes of the source."""
        return self.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves])

    def tree(self, leaves: list[Any]) -> Any:
        """The tree with these leaves."""
        return jax.tree_util.tree_unflatten(self.treedef, leaves)

    def as_json(self) -> dict[str, list[Any]]:
        """The spec as JSON values, for a fingerprint: {name: [dtype, shape]}."""
        return {leaf.name: [leaf.dtype.name, list(leaf.shape)] for leaf in self.leaves}


def first_difference(one: Any, other: Any, root: str) -> tuple[str, str | None, str | None] | None:
    """Of the leaves whose dtype or shape differs between two trees of rows, the first by name; None if all agree.

    Returns:
      (name of the leaf, its text in `one`, its text in `other`). The name begins with `root`. A text is the dtype
      and the shape, or None if the tree lacks the leaf. It shows the byte order only if this machine has another.
    """
    described = [
        {
            f"{root}{jax.tree_util.keystr(path)}": (
                f"{leaf.dtype if leaf.dtype.isnative else leaf.dtype.str}{list(leaf.shape)}"
            )
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (one, other)
    ]
    for leaf in sorted({*described[0], *described[1]}):
        first, second = (leaves.get(leaf) for leaves in described)
        if first != second:
            return leaf, first, second
    return None


def cast_into(out: Array, values: Array, leaf: Leaf, rows: npt.NDArray[np.int64]) -> None:
    """Write `values` into `out`, which has the dtype `leaf.placed_dtype`. Raises whatever `check_fits` raises."""
    with np.errstate(over="ignore"):
        np.copyto(out, values, casting="unsafe")
    if leaf.dtype != leaf.placed_dtype:
        _check_nothing_is_lost(values, out, leaf, rows)


def check_fits(values: Array, leaf: Leaf, rows: npt.NDArray[np.int64]) -> None:
    """Refuse values that `leaf.placed_dtype` cannot hold: integers out of range, floats that would become inf.

    Rounding is allowed, and so are infinities and NaNs.

    Raises:
      RowError: a value does not fit; the error names the first such row.
    """
    if leaf.dtype != leaf.placed_dtype:
        with np.errstate(over="ignore"):
            _check_nothing_is_lost(values, values.astype(leaf.placed_dtype), leaf, rows)


def _check_nothing_is_lost(values: Array, cast: Array, leaf: Leaf, rows: npt.NDArray[np.int64]) -> None:
    lost = _lost(values, cast)
    if not lost.any():
        return
    row = int(np.flatnonzero(lost.reshape(len(lost), -1).any(axis=1))[0])
    raise RowError(
        f"{leaf.name}: JAX holds {leaf.dtype} as {leaf.placed_dtype} unless x64 is enabled, and "
        f"{values[row][lost[row]].reshape(-1)[0]} does not fit. Store smaller numbers, or call "
        "jax.config.update('jax_enable_x64', True) before the feed is built",
        stage="read",
        row=int(rows[row]),
    )


def _lost(values: Array, cast: Array) -> npt.NDArray[np.bool_]:
    """True for integers that the cast changed, and for finite floats that it made infinite."""
    lost: npt.NDArray[np.bool_] = np.zeros(values.shape, np.bool_)
    if values.dtype.kind == "c":
        lost = _lost(values.real, cast.real) | _lost(values.imag, cast.imag)
    elif values.dtype.kind == "f":
        lost = np.isfinite(values) & ~np.isfinite(cast)
    elif values.dtype.kind in "iu":
        lost = values != cast
    return lost


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether JAX supports a dtype: booleans, and the numbers of NumPy (except long double) and of ml_dtypes."""
    if dtype in (np.longdouble, np.clongdouble) or dtype.kind == "m":  # issubdtype counts timedelta64 as a number
        return False
    return dtype.kind in "biufc" or bool(jnp.issubdtype(dtype, jnp.number))


def _placed_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """JAX's canonical dtype, in this machine's byte order."""
    native = dtype.newbyteorder("=") if dtype.kind in "iufc" else dtype
    return np.dtype(jax.dtypes.canonicalize_dtype(native))


def _leaf(name: str, value: Any) -> Leaf:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        raise TypeError(
            f"{name}: each leaf of a row must be a NumPy array or scalar, got {type(value).__name__}; "
            "tokenise or encode it as numbers first, as in grain.MapDataset.source(rows).map(encode)"
        )
    dtype = np.dtype(dtype)
    if not is_numeric(dtype):
        raise TypeError(
            f"{name}: an accelerator holds numbers and booleans, got dtype {dtype}; "
            "encode it as numbers first (a ragged list of rows becomes dtype object: pad it)"
        )
    return Leaf(name, tuple(shape), dtype, _placed_dtype(dtype))
