"""Rows of an HDF5 dataset, read chunk by chunk and decoded without the HDF5 library.

The library decodes one chunk at a time in a process, because of its lock, and a damaged chunk can end the process.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.sources.encoded.open_files import pread
from feedline._src.sources.hdf5.datasets import CHECKSUM_BYTES, DEFLATE, FLETCHER32, SHUFFLE, Dataset
from feedline._src.sources.hdf5.files import Leaf
from feedline._src.stores.remote_object import RemoteObject

Array = npt.NDArray[Any]
Read = Callable[[int, int], bytes]
"""(offset, size) → bytes, fewer where the file ends."""


def read_rows(path: Path | RemoteObject, leaf: Leaf, start: int, stop: int) -> Array:
    """Rows `start` to `stop` of a leaf, contiguous in memory.

    Raises:
      OSError, ValueError: they cannot be read, or are damaged.
      FeedError: they cannot be fetched.
    """
    if not isinstance(path, Path):
        path.fetch_parts(extents_of(leaf.dataset, start, stop))
        return leaf.field.of(_elements(path.read, leaf.dataset, start, stop))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return leaf.field.of(
            _elements(lambda offset, size: pread(descriptor, size, offset), leaf.dataset, start, stop)
        )
    finally:
        os.close(descriptor)


def extents_of(dataset: Dataset, start: int, stop: int) -> list[tuple[int, int]]:
    """Where the bytes of rows `start` to `stop` lie: offset and size of each part."""
    if is_one_piece(dataset):
        return [(int(dataset.places[0, 0]) + start * dataset.row_bytes, (stop - start) * dataset.row_bytes)]
    return [(offset, size) for offset, size, _ in dataset.places[_chunks_of(dataset, start, stop)].tolist()]


def is_one_piece(dataset: Dataset) -> bool:
    """Whether all rows follow each other in the file as they are."""
    return dataset.has_plain_rows and len(dataset.numbers) > 0 and dataset.chunk[0] >= dataset.shape[0]


def _chunks_of(dataset: Dataset, start: int, stop: int) -> slice:
    """Of the chunks that exist, those which hold some of these rows."""
    per_row, height = math.prod(dataset.grid[1:]), dataset.chunk[0]
    bounds = np.array([start // height * per_row, -(-stop // height) * per_row])
    return slice(*np.searchsorted(dataset.numbers, bounds).tolist())


def _elements(read: Read, dataset: Dataset, start: int, stop: int) -> Array:
    """uint8[k, *row shape, bytes of an element]."""
    shape = (stop - start, *dataset.shape[1:])
    if is_one_piece(dataset):
        ((offset, wanted),) = extents_of(dataset, start, stop)
        return np.frombuffer(_read(read, offset, wanted), np.uint8).reshape(*shape, dataset.item_bytes)
    element = np.dtype(f"V{dataset.item_bytes}")
    out = np.full(shape, np.frombuffer(dataset.fill, element)[0])
    for i in range(len(dataset.numbers))[_chunks_of(dataset, start, stop)]:
        corner = np.unravel_index(int(dataset.numbers[i]), dataset.grid)
        first = [int(at) * length for at, length in zip(corner, dataset.chunk, strict=True)]
        first[0] -= start
        offset, size, mask = dataset.places[i].tolist()
        chunk = _decoded(_read(read, offset, size), dataset, mask)
        place = tuple(
            slice(at, min(at + length, end)) for at, length, end in zip(first, dataset.chunk, shape, strict=True)
        )
        inside = tuple(slice(0, each.stop - each.start) for each in place)
        out[place] = np.frombuffer(chunk, element).reshape(dataset.chunk)[inside]
    return out.reshape(-1).view(np.uint8).reshape(*shape, dataset.item_bytes)


def _read(read: Read, offset: int, size: int) -> bytes:
    data = read(offset, size)
    if len(data) != size:
        raise ValueError(f"a chunk must have {size} bytes, and {len(data)} are left in the file")
    return data


def _decoded(data: bytes, dataset: Dataset, mask: int) -> bytes:
    """A chunk as it was before its filters, except for those that it skips."""
    for place, number in reversed(list(enumerate(dataset.filters))):
        if not mask >> place & 1:
            data = _DECODERS[number](data, dataset)
    if len(data) != dataset.chunk_bytes:
        raise ValueError(f"a chunk must have {dataset.chunk_bytes} bytes once decoded, and has {len(data)}")
    return data


def _inflated(data: bytes, dataset: Dataset) -> bytes:
    stream = zlib.decompressobj()
    found = stream.decompress(data, dataset.chunk_bytes + CHECKSUM_BYTES + 1)
    if not stream.eof:
        raise ValueError(f"a chunk must have {dataset.chunk_bytes} bytes once decompressed, and has others")
    return found


def _unshuffled(data: bytes, dataset: Dataset) -> bytes:
    """Elements in place of their first bytes, then their second bytes, and so on."""
    whole = len(data) // dataset.item_bytes * dataset.item_bytes
    planes = np.frombuffer(data, np.uint8, whole).reshape(dataset.item_bytes, -1)
    return planes.T.tobytes() + data[whole:]


def _checked(data: bytes, _: Dataset) -> bytes:
    """The data before its Fletcher-32 checksum, whose bytes some old versions of HDF5 wrote in reverse."""
    data, stored = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    words = np.frombuffer(data + bytes(len(data) % 2), ">u2").astype(np.uint64)
    weights = np.arange(len(words), 0, -1, dtype=np.uint64) % _FLETCHER
    sums = (words * weights).sum() % _FLETCHER, words.sum() % _FLETCHER
    for order in ("<u2", ">u2"):
        low, high = np.frombuffer(stored, order)[:: 1 if order == "<u2" else -1] if len(stored) == 4 else (0, 0)
        if (high % _FLETCHER, low % _FLETCHER) == sums and len(stored) == CHECKSUM_BYTES:
            return data
    raise ValueError("the checksum of a chunk must be that of its bytes, and is another one")


_FLETCHER = np.uint64(65535)
_DECODERS = {DEFLATE: _inflated, SHUFFLE: _unshuffled, FLETCHER32: _checked}
