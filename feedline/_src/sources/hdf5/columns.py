"""HDF5 files as columns: mapped into memory, or read in groups of rows if compressed or cut along other axes."""

from __future__ import annotations

import itertools
import math
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.rows.shards import EvenLengths
from feedline._src.sources.formats.grouped_file import Group, GroupedFile, memory_bytes
from feedline._src.sources.formats.mapped_file import MappedFile
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.opening import digest_of, opening
from feedline._src.sources.hdf5.chunks import extents_of, read_rows
from feedline._src.sources.hdf5.files import Leaf, read_file
from feedline._src.stores.remote_object import RemoteObject

Array = npt.NDArray[Any]
_GROUP_BYTES = 1 << 16  # of a contiguous dataset, which has no groups of its own


def mapped(path: Path | RemoteObject, options: OpenOptions) -> list[Any]:
    """The rows of a file that `is_mapped`, as trees of views of the mapped file, one after the other.

    Raises:
      FileNotFoundError, ValueError: it cannot be read as rows.
    """
    whole: Any
    if isinstance(path, Path):
        with opening(path) as file:
            whole = MappedFile(file).bytes
    else:
        whole = path.memory
    found = read_file(path, options)
    parts = [_parts(leaf, whole, path) for leaf in found.flat]
    cuts = sorted({0, found.rows} | {first for leaf in parts for first, _ in leaf})
    form = jax.tree.structure(found.leaves, is_leaf=lambda node: isinstance(node, Leaf))
    trees, at = [], [0] * len(parts)
    for start, stop in zip(cuts, cuts[1:] or [0], strict=False):
        for i, leaf in enumerate(parts):
            while at[i] + 1 < len(leaf) and leaf[at[i] + 1][0] <= start:
                at[i] += 1
        pairs = [leaf[at[i]] for i, leaf in enumerate(parts)]
        trees.append(jax.tree.unflatten(form, [rows[start - first : stop - first] for first, rows in pairs]))
    return trees


def _parts(leaf: Leaf, whole: Any, path: Path | RemoteObject) -> list[tuple[int, Array]]:
    """The rows of a leaf: first rows, and arrays that follow each other."""
    dataset, (rows, height) = leaf.dataset, (leaf.dataset.shape[0], leaf.dataset.chunk[0])
    if not dataset.has_plain_rows:
        return [(0, _in_memory(leaf, rows, path))]
    offsets = dataset.places[:, 0]
    firsts = dataset.numbers * height
    joined = np.zeros(len(firsts), bool)
    joined[1:] = (np.diff(firsts) == height) & (np.diff(offsets) == dataset.chunk_bytes)
    found: list[tuple[int, Array]] = []
    end = 0
    runs = [*np.flatnonzero(~joined).tolist(), len(firsts)]
    for run, following in itertools.pairwise(runs):
        first, last = int(firsts[run]), int(firsts[following - 1])
        if first > end:
            found.append((end, _filled(leaf, first - end, path)))
        end = min(last + height, rows)
        found.append((first, _view(leaf, end - first, whole, int(offsets[run]))))
    if end < rows or not found:
        found.append((end, _filled(leaf, rows - end, path)))
    return found


def _in_memory(leaf: Leaf, rows: int, path: Path | RemoteObject) -> Array:
    try:
        return read_rows(path, leaf, 0, rows)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{path} is damaged in {leaf.dataset.name}: {error}; write it again with h5py") from error


def _view(leaf: Leaf, rows: int, memory: Any, offset: int) -> Array:
    """Rows that follow each other in memory."""
    dataset, field = leaf.dataset, leaf.field
    shape = (rows, *dataset.shape[1:])
    strides = _strides(shape, dataset.item_bytes) + _strides(field.shape, field.dtype.itemsize)
    return np.ndarray((*shape, *field.shape), field.dtype, memory, offset + field.offset, strides)


def _strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * item_bytes for axis in range(len(shape)))


def _filled(leaf: Leaf, rows: int, path: Path | RemoteObject) -> Array:
    """Rows that were never written. All of them are the same memory."""
    dataset = leaf.dataset
    _check_memory(dataset.row_bytes, leaf, path)
    elements = np.full((1, *dataset.shape[1:]), np.frombuffer(dataset.fill, f"V{dataset.item_bytes}")[0])
    row = leaf.field.of(elements.reshape(-1).view(np.uint8).reshape(*elements.shape, dataset.item_bytes))
    return np.broadcast_to(row[0, ...], (rows, *row.shape[1:]))


def grouped(path: Path | RemoteObject, options: OpenOptions) -> GroupedFile:
    """The rows of any file, in groups of a chunk. Values of bytes and text are leaves of uint8, as stored.

    Raises:
      FileNotFoundError, ValueError: it cannot be read as rows.
    """
    file = read_file(path, options)
    leaves = file.flat
    heights = [_height(leaf) for leaf in leaves]
    for leaf, height in zip(leaves, heights, strict=True):
        _check_memory(min(height, file.rows) * leaf.dataset.row_bytes, leaf, path)

    def rows(leaf: int, group: int) -> tuple[int, int]:
        start = group * heights[leaf]
        return start, min(start + heights[leaf], file.rows)

    def read(leaf: int, group: int) -> Group:
        return Group(read_rows(path, leaves[leaf], *rows(leaf, group)))

    def extents(leaf: int, group: int) -> list[tuple[int, int]]:
        return extents_of(leaves[leaf].dataset, *rows(leaf, group))

    return GroupedFile(
        jax.tree.map(lambda leaf: leaf.spec, file.leaves, is_leaf=lambda node: isinstance(node, Leaf)),
        [EvenLengths(file.rows, height) for height in heights],
        read,
        lambda _: digest_of(path),
        extents,
    )


def _height(leaf: Leaf) -> int:
    """The rows of a group."""
    dataset = leaf.dataset
    if dataset.has_plain_rows and dataset.chunk[0] >= dataset.shape[0]:  # also one that was never written
        return max(1, _GROUP_BYTES // max(1, dataset.row_bytes))
    return dataset.chunk[0]


def _check_memory(needed: int, leaf: Leaf, path: Path | RemoteObject) -> None:
    has = memory_bytes()
    if needed > has:
        raise ValueError(
            f"{path}: rows of {leaf.dataset.name} that are read at once must fit into memory, and take {needed} "
            f"bytes of the {has} there are; write it again in smaller chunks if it is not damaged"
        )
