"""Values of variable length in the heap of an HDF5 file.

The heap is made of collections: "GCOL", version 1, the size, and then objects with an index, a size and their
bytes. A dataset refers to a value by its length, the address of its collection, and its index there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from feedline._src.sources.hdf5.elements import REFERENCE

_HEADER = struct.Struct("<4sB3xQ")
_OBJECT = struct.Struct("<HHIQ")  # index, references, and size, without the padding to a multiple of 8
_COLLECTION_BYTES = 1 << 12
"""The size of a collection of small values; one with a larger value has hardly any other."""


class Parts(Protocol):
    """A file that is open for reading."""

    def read(self, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> list[bytes]:
        """The bytes at each offset, fewer where the file ends."""


def places_of(base: int, stored: npt.NDArray[np.uint8], item_bytes: int) -> list[tuple[int, int]]:
    """Offset and about the length of the collections that hold the values of some rows, as `read_values`."""
    references = np.ascontiguousarray(stored).view(REFERENCE).reshape(-1)
    references = references[references["length"] > 0]
    at, length = base + references["address"].astype(np.int64), references["length"].astype(np.int64)
    sizes = np.maximum(_COLLECTION_BYTES, _HEADER.size + _OBJECT.size + item_bytes * length)
    return list(zip(at.tolist(), sizes.tolist(), strict=True))


def read_values(
    file: Parts, size_bytes: int, base: int, stored: npt.NDArray[np.uint8], item_bytes: int
) -> list[bytes]:
    """The values of some rows.

    Args:
      file: open, of this size.
      base: what addresses are relative to.
      stored: uint8[k, 16], as in the dataset.
      item_bytes: of an item of a value, whose length counts items.

    Raises:
      OSError, MemoryError: they cannot be read.
      ValueError: the file is damaged.
    """
    references = np.ascontiguousarray(stored).view(REFERENCE).reshape(-1)
    found = [b""] * len(references)
    wanted: dict[int, dict[int, list[int]]] = {}
    for i, (length, address, index) in enumerate(references.tolist()):
        if length:
            if not 0 < base + address <= size_bytes - length * item_bytes:
                raise ValueError(f"a value lies at byte {base + address} of {size_bytes}")
            wanted.setdefault(base + address, {}).setdefault(index, []).append(i)
    lengths = [
        max(
            _COLLECTION_BYTES,
            _HEADER.size + _OBJECT.size + item_bytes * int(references["length"][next(iter(of.values()))[0]]),
        )
        for of in wanted.values()
    ]
    blocks = file.read(np.array(list(wanted), np.int64), np.array(lengths, np.int64))
    for i, (address, places) in enumerate(wanted.items()):
        for index, value in _values(file, address, blocks[i], places, size_bytes):
            for place in places[index]:
                if len(value) != item_bytes * int(references["length"][place]):
                    raise ValueError("a value has another length in the heap than in its dataset")
                found[place] = value
        blocks[i] = b""
    return found


def _values(
    file: Parts, address: int, block: bytes, wanted: dict[int, Any], size_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """The wanted objects of the collection at `address`, of which `block` has the first bytes.

    Raises:
      ValueError: it is none, or lacks one of them.
    """
    if len(block) < _HEADER.size:
        raise ValueError("a collection of values is truncated")
    mark, version, size = _HEADER.unpack_from(block)
    if mark != b"GCOL" or version != 1 or not _HEADER.size <= size <= size_bytes - address:
        raise ValueError(f"no collection of values begins at byte {address}")
    missing = set(wanted)
    at = _HEADER.size
    while missing and at + _OBJECT.size <= size:
        if at + _OBJECT.size > len(block):
            block = _whole(file, address, size)
        index, _, _, length = _OBJECT.unpack_from(block, at)
        start, at = at + _OBJECT.size, at + _OBJECT.size + (length + 7) // 8 * 8
        if index == 0 or start + length > size:
            break
        if index in missing:
            if start + length > len(block):
                block = _whole(file, address, size)
            missing.remove(index)
            yield index, block[start : start + length]
    if missing:
        raise ValueError(f"the collection at byte {address} has no value {min(missing)}")


def _whole(file: Parts, address: int, size: int) -> bytes:
    (block,) = file.read(np.array([address]), np.array([size]))
    if len(block) != size:
        raise ValueError("a collection of values is truncated")
    return block
