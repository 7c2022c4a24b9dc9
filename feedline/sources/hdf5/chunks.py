"""Rows of an HDF5 dataset, read chunk by chunk. Only filters that few files have need the HDF5 library."""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline.sources.encoded.open_files import pread
from feedline.sources.hdf5.datasets import Dataset
from feedline.sources.hdf5.files import Leaf, opened

Array = npt.NDArray[Any]


def read_rows(path: Path, leaf: Leaf, start: int, stop: int) -> Array:
    """Rows `start` to `stop` of a leaf, contiguous in memory.

    Raises:
      OSError, ValueError: they cannot be read, or are damaged.
    """
    if leaf.dataset.needs_library:
        with opened(path) as file:
            values = file[leaf.dataset.name][start:stop]
        for name in leaf.field.names:
            values = values[name]
        if leaf.field.bytes is not None:
            values = np.ascontiguousarray(values).view(np.uint8).reshape(stop - start, *leaf.field.shape)
        return np.ascontiguousarray(values, leaf.field.dtype)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return leaf.field.of(_elements(descriptor, leaf.dataset, start, stop))
    finally:
        os.close(descriptor)


def _elements(descriptor: int, dataset: Dataset, start: int, stop: int) -> Array:
    """uint8[k, *row shape, bytes of an element]."""
    shape = (stop - start, *dataset.shape[1:])
    if dataset.has_plain_rows and len(dataset.numbers) and dataset.chunk[0] >= dataset.shape[0]:
        wanted = (stop - start) * dataset.row_bytes
        data = _read(descriptor, wanted, int(dataset.places[0, 0]) + start * dataset.row_bytes)
        return np.frombuffer(data, np.uint8).reshape(*shape, dataset.item_bytes)
    element = np.dtype(f"V{dataset.item_bytes}")
    out = np.full(shape, np.frombuffer(dataset.fill, element)[0])
    per_row = math.prod(dataset.grid[1:])
    height = dataset.chunk[0]
    bounds = np.array([start // height * per_row, -(-stop // height) * per_row])
    for i in range(*np.searchsorted(dataset.numbers, bounds)):
        corner = np.unravel_index(int(dataset.numbers[i]), dataset.grid)
        first = [int(at) * length for at, length in zip(corner, dataset.chunk, strict=True)]
        first[0] -= start
        offset, size, mask = dataset.places[i].tolist()
        chunk = _decoded(_read(descriptor, size, offset), dataset, mask)
        place = tuple(
            slice(at, min(at + length, end)) for at, length, end in zip(first, dataset.chunk, shape, strict=True)
        )
        inside = tuple(slice(0, each.stop - each.start) for each in place)
        out[place] = np.frombuffer(chunk, element).reshape(dataset.chunk)[inside]
    return out.reshape(-1).view(np.uint8).reshape(*shape, dataset.item_bytes)


def _read(descriptor: int, size: int, offset: int) -> bytes:
    data = pread(descriptor, size, offset)
    if len(data) != size:
        raise ValueError(f"a chunk must have {size} bytes, and {len(data)} are left in the file")
    return data


def _decoded(data: bytes, dataset: Dataset, mask: int) -> bytes:
    """A chunk as it was before its filters, shuffle and then deflate, except for those that it skips."""
    for place, name in reversed(list(enumerate(dataset.filters))):
        if mask >> place & 1:
            continue
        if name == 1:
            stream = zlib.decompressobj()
            data = stream.decompress(data, dataset.chunk_bytes + 1)
            if not stream.eof:
                raise ValueError(
                    f"a chunk must have {dataset.chunk_bytes} bytes once decompressed, and has others"
                )
        elif len(data) == dataset.chunk_bytes:
            data = np.frombuffer(data, np.uint8).reshape(dataset.item_bytes, -1).T.tobytes()
    if len(data) != dataset.chunk_bytes:
        raise ValueError(f"a chunk must have {dataset.chunk_bytes} bytes once decompressed, and has {len(data)}")
    return data
