"""Trees of arrays, in files and in memory, whose rows follow each other."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import FileArray
from feedline._src.rows.spec import is_numeric
from feedline._src.rows.values import as_array, is_in_memory, is_list

if TYPE_CHECKING:
    from feedline._src.files.file import File
    from feedline._src.formats.registry import Format

Array = npt.NDArray[Any]
Read = Callable[["File", OpenOptions], list[Any]]
"""The trees of arrays of a file: what `Format.open` is for formats that are mapped."""


def mapped_format(path: str) -> Format:
    """The format of a file of arrays.

    Raises:
      ValueError: its suffix names none.
    """
    from feedline._src.formats.registry import MODULES, format_of, suffix_of

    suffix = suffix_of(path)
    form = format_of(suffix) if suffix in MODULES else None
    if form is None or form.way != "mapped" or form.open is None:
        raise ValueError(f"a file of arrays ends in .npy, .npz, .bin, got {path}; convert it with numpy.save")
    return form


def read_by_suffix(file: File, options: OpenOptions) -> list[Any]:
    """The trees of arrays of a file of any format that is mapped."""
    read: Any = mapped_format(file.name).open
    found: list[Any] = read(file, options)
    return found


def trees_of(shard: Any, options: OpenOptions, opened: Callable[[str, OpenOptions], list[Any]]) -> list[Any]:
    """A shard as trees of arrays, whose rows follow each other.

    Args:
      shard: a path, or a tree of arrays and paths.
      options: of a file that is a shard, and window and stride.
      opened: (path, options) → the trees of a file.
    """
    if isinstance(shard, str | os.PathLike):
        name = os.fspath(shard)
        checked = functools.partial(_checked, name)
        trees = [jax.tree_util.tree_map_with_path(checked, tree) for tree in opened(name, options)]
    else:
        trees = [jax.tree_util.tree_map_with_path(functools.partial(_leaf, opened), shard, is_leaf=is_list)]
    if (length := options.window) is not None:
        trees = jax.tree.map(lambda array: windows(array, length, options.stride or length), trees)
    return trees


def _leaf(opened: Callable[[str, OpenOptions], list[Any]], path: Any, leaf: Any) -> Array | FileArray:
    name = f"source{jax.tree_util.keystr(path)}"
    file = None
    if isinstance(leaf, str | os.PathLike):
        file = os.fspath(leaf)
        array, *more = opened(file, OpenOptions())
        if more or not isinstance(array, np.ndarray | FileArray):
            raise ValueError(
                f"{name}: a leaf is one array, and {leaf} holds several; pass the path itself as the source"
            )
    elif is_in_memory(leaf):
        array = as_array(name, leaf)
    elif is_list(leaf):
        raise TypeError(
            f"{name}: a list may mean rows or columns, so it is refused, got one of {len(leaf)} elements. For "
            "columns pass a tuple or a dict of arrays. For rows pass numpy.stack(rows); or an object with __len__ "
            "and __getitem__, as grain.MapDataset.source(rows) is; or, of files, a glob"
        )
    else:
        raise TypeError(
            f"{name}: a leaf must be an array or the path of a .npy file, got {type(leaf).__name__}; "
            "leaf[...] reads an array of HDF5, Zarr or netCDF into memory, numpy.asarray(leaf) a sequence of "
            "numbers. For rows that are read when they are asked for, pass the path of the .h5 or .zarr, or an "
            "object with __len__ and __getitem__"
        )
    return _checked(file, path, array)


def _checked(file: str | None, path: Any, array: Array | FileArray) -> Array | FileArray:
    """The array of a leaf, after a check that it holds rows of numbers; `file` is None if it lies in memory."""
    name = f"source{jax.tree_util.keystr(path)}{f' of {file}' if file else ''}"
    if array.ndim == 0:
        raise ValueError(f"{name}: an array needs a first axis that counts rows, got a scalar")
    if not is_numeric(array.dtype):
        raise TypeError(
            f"{name}: an accelerator holds numbers and booleans, got dtype {array.dtype}; encode it as "
            "numbers first (rows of different lengths make dtype object: pad them)"
        )
    return array if isinstance(array, FileArray) else np.asarray(array)


def checked_leaves(tree: Any, name: str, first: Any, first_name: str) -> list[Array | FileArray]:
    """The leaves of a shard, after checks of their lengths and that they have the form of the first shard."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError("a source must have at least one array, got an empty tree")
    form: Any = jax.tree_util.tree_structure(tree)
    if form != jax.tree_util.tree_structure(first):
        raise ValueError(f"shards must have the same leaves; {name} has other ones than {first_name}")
    lengths = {f"source{jax.tree_util.keystr(path)}": len(leaf) for path, leaf in leaves}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{leaf} has {length}" for leaf, length in lengths.items())
        raise ValueError(
            f"all leaves must have the same number of rows, but {listed} in {name}; cut them to one length"
        )
    for (path, leaf), reference in zip(leaves, jax.tree_util.tree_leaves(first), strict=True):
        if (leaf.dtype, leaf.shape[1:]) != (reference.dtype, reference.shape[1:]):
            raise ValueError(
                f"source{jax.tree_util.keystr(path)}: shards must agree in dtype and row shape; {name} has "
                f"{leaf.dtype}{list(leaf.shape[1:])}, {first_name} {reference.dtype}{list(reference.shape[1:])}"
            )
    return [leaf for _, leaf in leaves]


def why_empty(options: OpenOptions, first: str) -> str:
    if options.window is None:
        return f"arrays of length 0 in {first}; check what wrote it"
    return f"{first}, and no shard with {options.window} elements, the length of a window; choose a shorter one"


def windows(array: Array | FileArray, length: int, stride: int) -> Array | FileArray:
    """The view [n, length, …] of an array [m, …]: n = (m − length) // stride + 1, and 0 if m < length.

    Window i holds elements i·stride … i·stride + length − 1. Elements after the last whole window are left out.

    Example:
      >>> windows(np.arange(7), length=3, stride=2).tolist()
      [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    """
    if len(array) < length:
        return np.empty((0, length, *array.shape[1:]), array.dtype)
    shape = ((len(array) - length) // stride + 1, length, *array.shape[1:])
    strides = (stride * array.strides[0], *array.strides)
    if isinstance(array, FileArray):
        return dataclasses.replace(array, shape=shape, strides=strides)
    return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=False)
