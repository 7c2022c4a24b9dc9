"""Where the chunks of an HDF5 dataset lie in its file."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.sources.formats import extras
from feedline._src.sources.hdf5.elements import RefusedError, bytes_of

Indices = npt.NDArray[np.int64]
DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
CHECKSUM_BYTES = 4


class Dataset(NamedTuple):
    """A dataset. One that is contiguous has a single chunk.

    Attributes:
      name: in the file.
      shape: of the dataset; rows are along the first axis.
      item_bytes: of an element.
      fill: the bytes of an element that was never written.
      chunk: the shape of a chunk.
      filters: HDF5's numbers of the filters, in the order in which they were applied; chunks may skip some.
      numbers: int64[k], of the chunks that exist, ascending; counted in C order.
      places: int64[k, 3], of these chunks: offset and size in bytes, and the mask of the filters that it skips.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    fill: bytes
    chunk: tuple[int, ...]
    filters: tuple[int, ...]
    numbers: Indices
    places: Indices

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk that is not compressed."""
        return math.prod(self.chunk) * self.item_bytes

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-length // chunk) for length, chunk in zip(self.shape, self.chunk, strict=True))

    @property
    def has_plain_rows(self) -> bool:
        """Whether the bytes of each row lie in the file in one piece, as they are."""
        return not self.filters and self.chunk[1:] == self.shape[1:]


def dataset_of(opened: Any, size_bytes: int) -> Dataset:
    """The description of an `h5py.Dataset` in a file of this size.

    Raises:
      RefusedError: it is stored in a way that feedline does not read.
      ValueError: it is damaged.
    """
    h5d = extras.require("h5py.h5d", "hdf5")
    created, shape = opened.id.get_create_plist(), opened.shape
    layout = created.get_layout()
    if layout not in (h5d.CONTIGUOUS, h5d.CHUNKED) or created.get_external_count():
        raise RefusedError(
            "its data must lie in the file itself, contiguous or in chunks, and it is virtual, compact or in "
            "external files; open those files themselves, or write it again: new[name] = old[name][:]"
        )
    item_bytes = bytes_of(opened.id.get_type())
    chunk = created.get_chunk() if layout == h5d.CHUNKED else tuple(max(1, length) for length in shape)
    filters = _filters(created)
    dataset = Dataset(
        opened.name, shape, item_bytes, b"", chunk, filters, np.zeros(0, np.int64), np.zeros((0, 3), np.int64)
    )
    if layout == h5d.CHUNKED:
        dataset = _with_chunks(dataset, opened)
    elif opened.id.get_space_status() == h5d.SPACE_STATUS_ALLOCATED and opened.id.get_storage_size():
        place = [[opened.id.get_offset(), dataset.chunk_bytes, 0]]
        dataset = dataset._replace(numbers=np.zeros(1, np.int64), places=np.array(place, np.int64))
    dataset = dataset._replace(fill=_fill(opened, created, item_bytes, len(dataset.numbers) < _count(dataset)))
    _check(dataset, size_bytes)
    return dataset


def _filters(created: Any) -> tuple[int, ...]:
    """The numbers of the filters. RefusedError: feedline does not decode them."""
    found = [created.get_filter(i) for i in range(created.get_nfilters())]
    numbers = tuple(number for number, *_ in found)
    # a writer may leave the last chunks unfiltered, which only gzip and checksums reveal
    if not set(numbers) <= {DEFLATE, SHUFFLE, FLETCHER32} or numbers == (SHUFFLE,):
        names = ", ".join(
            (name or b"").decode(errors="replace") or f"filter {number}" for number, *_, name in found
        )
        raise RefusedError(
            "of HDF5's filters feedline decodes gzip, shuffle with gzip, and fletcher32, and its chunks have "
            f"{names}; write it again: new.create_dataset(name, data=old[name][:], compression='gzip')"
        )
    return numbers


def _count(dataset: Dataset) -> int:
    return math.prod(dataset.grid)


def _with_chunks(dataset: Dataset, opened: Any) -> Dataset:
    found: list[tuple[int, ...]] = []
    opened.id.chunk_iter(
        lambda chunk: found.append((*chunk.chunk_offset, chunk.byte_offset, chunk.size, chunk.filter_mask))
    )
    table = np.array(found, np.int64).reshape(len(found), len(dataset.shape) + 3)
    at, places = table[:, :-3], table[:, -3:]
    inside = (at < np.array(dataset.shape)).all(axis=1)  # a dataset that was made smaller may keep a chunk
    steps = np.array([math.prod(dataset.grid[axis + 1 :]) for axis in range(len(dataset.shape))], np.int64)
    numbers = (at[inside] // np.array(dataset.chunk) * steps).sum(axis=1, dtype=np.int64)
    order = np.argsort(numbers)
    if (np.diff(numbers[order]) == 0).any():
        raise ValueError(f"dataset {dataset.name}: two chunks claim the same rows")
    return dataset._replace(numbers=numbers[order], places=places[inside][order])


def _fill(opened: Any, created: Any, item_bytes: int, needed: bool) -> bytes:
    """The bytes of the fill value."""
    h5d = extras.require("h5py.h5d", "hdf5")
    defined = created.fill_value_defined()
    if not needed or defined == h5d.FILL_VALUE_DEFAULT:
        return bytes(item_bytes)
    if defined == h5d.FILL_VALUE_UNDEFINED:
        raise RefusedError("every row must be written, since it has no fill value, and some are not; write them")
    value = np.zeros((), opened.dtype)
    if value.dtype.hasobject or value.dtype.itemsize != item_bytes:
        raise RefusedError(
            "every row must be written, since a fill value of variable length is not read; write them"
        )
    created.get_fill_value(value)
    return value.tobytes()


def _check(dataset: Dataset, size_bytes: int) -> None:
    """Refuse chunks that do not lie in the file, or whose size cannot be right."""
    offset, size, _ = dataset.places.T
    if not ((offset >= 0) & (size >= 0) & (size <= size_bytes) & (offset <= size_bytes - size)).all():
        raise ValueError(f"dataset {dataset.name}: its chunks lead out of the file, which has {size_bytes} bytes")
    if not dataset.filters and (size != dataset.chunk_bytes).any():
        raise ValueError(f"dataset {dataset.name}: a chunk must have {dataset.chunk_bytes} bytes, and one has not")
