"""Arrays of files, of objects in stores and in memory as trees, whose rows follow each other."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.formats.open_options import OpenOptions
from feedline._src.rows.spec import is_numeric
from feedline._src.rows.values import as_array, is_in_memory, is_list

if TYPE_CHECKING:
    from feedline._src.files.version import FileVersion
    from feedline._src.stores.opening import RemoteObjects

Array = npt.NDArray[Any]


class OpenedArrays(NamedTuple):
    """What is open: the versions of files by path, and the objects in stores."""

    versions: dict[str, FileVersion]
    objects: RemoteObjects | None

    @classmethod
    def of(cls, paths: Sequence[str], options: OpenOptions) -> OpenedArrays:
        """The objects among some paths, and no file yet."""
        if not paths:
            return cls({}, None)
        from feedline._src.stores.urls import is_url

        urls = [path for path in paths if is_url(path)]
        if not urls:
            return cls({}, None)
        from feedline._src.stores.opening import RemoteObjects
        from feedline._src.stores.options import Store
        from feedline._src.stores.remote_object import SMALL_BYTES

        objects = RemoteObjects(urls, options.store or Store())
        objects.samples([(url, 0, SMALL_BYTES) for url in objects.by_url])  # the headers, all at once
        return cls({}, objects)

    def load(self, path: str, dtype: Any = None) -> Any:
        """The arrays of a file or of an object."""
        from feedline._src.formats import npy
        from feedline._src.stores.urls import is_url

        if self.objects is None or not is_url(path):
            arrays, self.versions[os.path.abspath(path)] = npy.load(Path(path), dtype)
            return arrays
        from feedline._src.formats.npy import MappedObject
        from feedline._src.stores.remote_object import open_object

        item = self.objects.by_url[path]
        return npy.arrays_in(MappedObject(item.memory), open_object(item), path, dtype)


def as_tree(shard: Any, options: OpenOptions, opened: OpenedArrays) -> Any:
    """A shard as a tree of arrays."""
    if isinstance(shard, str | os.PathLike):
        name = os.fspath(shard)
        arrays = opened.load(name, options.dtype)
        shard = jax.tree_util.tree_map_with_path(functools.partial(_checked, name), options.named(arrays, name))
    tree = jax.tree_util.tree_map_with_path(functools.partial(_as_array, opened), shard, is_leaf=is_list)
    length = options.window
    if length is None:
        return tree
    return jax.tree.map(lambda array: windows(array, length, options.stride or length), tree)


def _as_array(opened: OpenedArrays, path: Any, leaf: Any) -> Array:
    name = f"source{jax.tree_util.keystr(path)}"
    file = None
    if isinstance(leaf, str | os.PathLike):
        file = os.fspath(leaf)
        array: Any = opened.load(file)
        if not isinstance(array, np.ndarray):
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


def _checked(file: str | None, path: Any, array: Array) -> Array:
    """The array of a leaf, after a check that it holds rows of numbers; `file` is None if it lies in memory."""
    name = f"source{jax.tree_util.keystr(path)}{f' of {file}' if file else ''}"
    if array.ndim == 0:
        raise ValueError(f"{name}: an array needs a first axis that counts rows, got a scalar")
    if not is_numeric(array.dtype):
        raise TypeError(
            f"{name}: an accelerator holds numbers and booleans, got dtype {array.dtype}; encode it as "
            "numbers first (rows of different lengths make dtype object: pad them)"
        )
    return np.asarray(array)


def checked_leaves(tree: Any, name: str, first: Any, first_name: str) -> list[Array]:
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


def windows(array: Array, length: int, stride: int) -> Array:
    """The view [n, length, …] of an array [m, …]: n = (m − length) // stride + 1, and 0 if m < length.

    Window i holds elements i·stride … i·stride + length − 1. Elements after the last whole window are left out.

    Example:
      >>> windows(np.arange(7), length=3, stride=2).tolist()
      [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    """
    if len(array) < length:
        return np.empty((0, length, *array.shape[1:]), array.dtype)
    sliding = np.lib.stride_tricks.sliding_window_view(array, length, axis=0)
    return np.moveaxis(sliding, -1, 1)[::stride]
