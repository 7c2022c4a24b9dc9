"""What a row looks like: leaves' names, dtypes and shapes, and the checked cast to JAX's dtypes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from feedline.errors import RowError

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a row.

    Attributes:
      name: as a user would write it: ``batch['image']``.
      shape: of one row.
      dtype: as the source has it.
      placed: the dtype it has on the mesh: JAX's canonical one (int64 becomes int32 without x64).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    placed: np.dtype[Any]


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """The tree of a row and its leaves, in the order in which JAX flattens it."""

    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, tree: Any) -> RowSpec:
        """The spec of a tree of anything with a shape and a dtype.

        Raises:
          TypeError: a leaf is not an array of numbers.
        """
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        if not paths:
            raise TypeError("a row must have at least one leaf, got an empty tree")
        return cls(treedef, tuple(_leaf(f"batch{jax.tree_util.keystr(path)}", x) for path, x in paths))

    def tree(self, leaves: list[Any]) -> Any:
        """The tree with `leaves` in it."""
        return jax.tree_util.tree_unflatten(self.treedef, leaves)

    def described(self) -> dict[str, list[Any]]:
        """As JSON values, for a fingerprint: {name: [dtype, shape]}."""
        return {leaf.name: [leaf.dtype.name, list(leaf.shape)] for leaf in self.leaves}


def cast_into(out: Array, values: Array, leaf: Leaf, rows: npt.NDArray[np.int64]) -> None:
    """Write `values` into `out`, which has the leaf's placed dtype.

    Raises:
      RowError: an integer does not fit; it names the first such row.
    """
    check_fits(values, leaf, rows)
    np.copyto(out, values, casting="unsafe")


def check_fits(values: Array, leaf: Leaf, rows: npt.NDArray[np.int64]) -> None:
    """Refuse integers that JAX's dtype for the leaf cannot hold.

    Raises:
      RowError: an integer does not fit; it names the first such row.
    """
    if leaf.dtype.kind in "iu" and leaf.dtype != leaf.placed:
        limits = np.iinfo(leaf.placed)
        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        bad = np.flatnonzero(((flat < limits.min) | (flat > limits.max)).any(axis=1))
        if len(bad):
            found = flat[bad[0]]
            found = found[(found < limits.min) | (found > limits.max)][0]
            raise RowError(
                f"{leaf.name}: JAX holds {leaf.dtype} as {leaf.placed} unless x64 is enabled, and {found} "
                f"does not fit. Store smaller numbers, or jax.config.update('jax_enable_x64', True)",
                stage="read",
                row=int(rows[bad[0]]),
            )


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether JAX can hold it: booleans, NumPy's numbers, and those that ml_dtypes adds."""
    if dtype in (np.longdouble, np.clongdouble):
        return False
    return dtype.kind in "biufc" or bool(jnp.issubdtype(dtype, jnp.number))


def _placed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """JAX's canonical dtype, in this machine's byte order."""
    native = dtype.newbyteorder("=") if dtype.kind in "iufc" else dtype
    return np.dtype(jax.dtypes.canonicalize_dtype(native))


def _leaf(name: str, value: Any) -> Leaf:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
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
    return Leaf(name, tuple(shape), dtype, _placed(dtype))
