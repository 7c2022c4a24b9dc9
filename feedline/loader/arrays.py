"""Rows of arrays, in memory or mapped from `.npy` and `.npz` files: the columnar source."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline.loader import files
from feedline.loader.spec import is_numeric
from feedline.placement.plan import Columns

Array = npt.NDArray[Any]
_SAMPLED_ROWS = 16
_SAMPLED_BYTES = 1 << 12


class ArraySource:
    """A `RowSource` over a tree of arrays whose first axes agree; each leaf may come in shards.

    Reads are thread-safe: they only copy out of arrays. Pickled, it carries paths and opens the
    files again where it lands.

    Args:
      shards: each a path to a `.npy` or `.npz` file, or a tree of arrays and of paths to `.npy` files,
        all of one structure. The source's rows are those of the first, then of the second, and so on.

    Raises:
      ValueError: no rows, or leaves, or shards that do not fit together.
      TypeError: a leaf is neither an array nor a path, or its dtype is no number.

    Example:
      >>> source = ArraySource([{"x": np.arange(6).reshape(3, 2)}])
      >>> out = {"x": np.empty((2, 2), np.int64)}
      >>> source.read(np.array([2, 0]), out)
      >>> out["x"].tolist()
      [[4, 5], [0, 1]]
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        self._shards = list(shards)
        self._open()

    def _open(self) -> None:
        trees = [_as_arrays(shard) for shard in self._shards]
        self._treedef = jax.tree_util.tree_structure(trees[0])
        self._parts = [_checked_leaves(tree, trees[0], i) for i, tree in enumerate(trees)]
        lengths = [len(part[0]) for part in self._parts]
        self._ends = np.cumsum(lengths, dtype=np.int64)
        if self._ends[-1] == 0:
            raise ValueError("a source must have at least one row, got arrays of length 0")
        self.spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), trees[0])

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every shard: no path, so a moved data set stays the same."""
        return {"kind": "arrays", "shards": [[_sample(array) for array in part] for part in self._parts]}

    @property
    def picklable(self) -> bool:
        """Whether worker processes can open it again: every leaf is a path."""
        return all(isinstance(leaf, str | os.PathLike) for leaf in jax.tree.leaves(self._shards))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`."""
        for leaf, target in enumerate(jax.tree_util.tree_leaves(out)):
            self.read_leaf(leaf, rows, (slice(None),) * (target.ndim - 1), target)

    def read_leaf(self, leaf: int, rows: npt.NDArray[np.int64], columns: Columns, out: Array) -> None:
        """Write the `columns` of rows[i] of one leaf to out[i], which has the leaf's dtype."""
        if len(self._parts) == 1:
            return _take(self._parts[0][leaf], rows, columns, out)
        shard_of = np.searchsorted(self._ends, rows, side="right")
        for shard in np.unique(shard_of):
            here = np.flatnonzero(shard_of == shard)
            part = self._parts[shard][leaf]
            first = self._ends[shard] - len(part)
            temporary = np.empty((len(here), *out.shape[1:]), out.dtype)
            _take(part, rows[here] - first, columns, temporary)
            out[here] = temporary
        return None

    def close(self) -> None:
        """Nothing to do: a mapped file is unmapped with the last array that refers to it."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_shards": self._shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shards = state["_shards"]
        self._open()


def _as_arrays(shard: Any) -> Any:
    """A tree of arrays: a `.npz` file is a dict of them."""
    if isinstance(shard, str | os.PathLike) and Path(shard).suffix == ".npz":
        shard = files.load(Path(shard))
    return jax.tree_util.tree_map_with_path(_as_array, shard)


def _as_array(path: Any, leaf: Any) -> Array:
    name = f"source{jax.tree_util.keystr(path)}"
    if isinstance(leaf, str | os.PathLike):
        array = files.load(Path(leaf))
        if not isinstance(array, np.ndarray):
            raise ValueError(
                f"{name}: a leaf is one array, and {leaf} holds several; pass the path itself as the source"
            )
    elif isinstance(leaf, np.ndarray | jax.Array):
        array = np.asarray(leaf)
    else:
        raise TypeError(
            f"{name}: a leaf must be an array or the path of a .npy file, got {type(leaf).__name__}; "
            "numpy.asarray turns a list of equal rows into an array"
        )
    if array.ndim == 0:
        raise ValueError(f"{name}: an array needs a first axis that counts rows, got a scalar")
    if not is_numeric(array.dtype):
        raise TypeError(
            f"{name}: an accelerator holds numbers and booleans, got dtype {array.dtype}; encode it as "
            "numbers first (rows of different lengths make dtype object: pad them)"
        )
    return array


def _checked_leaves(tree: Any, first: Any, shard: int) -> list[Array]:
    """The leaves of a shard, which agree in length with each other and in form with the first shard."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError("a source must have at least one array, got an empty tree")
    form: Any = jax.tree_util.tree_structure(tree)
    if form != jax.tree_util.tree_structure(first):
        raise ValueError(f"shards must have the same leaves; shard {shard} has other ones than shard 0")
    lengths = {f"source{jax.tree_util.keystr(path)}": len(leaf) for path, leaf in leaves}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"all leaves must have the same number of rows, but {told}; cut them to one length")
    for (path, leaf), reference in zip(leaves, jax.tree_util.tree_leaves(first), strict=True):
        if (leaf.dtype, leaf.shape[1:]) != (reference.dtype, reference.shape[1:]):
            raise ValueError(
                f"source{jax.tree_util.keystr(path)}: shards must agree in dtype and row shape; shard {shard} "
                f"has {leaf.dtype}{list(leaf.shape[1:])}, shard 0 {reference.dtype}{list(reference.shape[1:])}"
            )
    return [leaf for _, leaf in leaves]


def _take(array: Array, rows: npt.NDArray[np.int64], columns: Columns, out: Array) -> None:
    """out[i] = array[rows[i]] cut to columns, without a copy of anything but these rows."""
    whole = all(isinstance(column, slice) for column in columns)
    if array.flags.c_contiguous and out.flags.c_contiguous and out.shape[1:] == array.shape[1:]:
        # mode="clip" spares the temporary that "raise" makes with out=; the rows are in range by construction
        np.take(array, rows, axis=0, out=out, mode="clip")
    elif whole:
        out[...] = array[(slice(None), *columns)][rows]
    else:  # np.take would first copy the whole of an array that is not contiguous
        part = array[rows]
        for axis, column in enumerate(columns, start=1):
            part = part[(slice(None),) * axis + (column,)]
        out[...] = part


def _sample(array: Array) -> list[Any]:
    """Dtype, shape and a digest of sampled rows of one array."""
    picked = np.unique(np.linspace(0, max(len(array) - 1, 0), _SAMPLED_ROWS).astype(np.int64))
    hashed = hashlib.sha256()
    for row in picked[: len(array)]:
        hashed.update(np.ascontiguousarray(array[row]).reshape(-1).view(np.uint8)[:_SAMPLED_BYTES].tobytes())
    return [array.dtype.str, list(array.shape), hashed.hexdigest()[:32]]
