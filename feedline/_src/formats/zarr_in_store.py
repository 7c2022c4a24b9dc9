"""Zarr arrays and groups in stores: feedline fetches their chunks, and TensorStore decodes them from memory."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.formats import extras
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import memory_bytes
from feedline._src.formats.zarr import (
    MARKS,
    ZarrArray,
    missing_error,
    parsed_metadata,
    result_in_python,
    says_array,
)
from feedline._src.stores.client import Version
from feedline._src.stores.keyed_objects import KeyedObjects, Shared
from feedline._src.stores.many_objects import ManyObjects, whole
from feedline._src.stores.opening import folders
from feedline._src.stores.options import Store
from feedline._src.stores.urls import Url

_CONSOLIDATED = ".zmetadata"
Array = npt.NDArray[Any]
Corner = tuple[int, ...]
_INDICES_BYTES = 1 << 26
_NONE = (1 << 64) - 1  # in the index of a shard: there is no such chunk


def is_zarr_in_store(address: str, options: Store) -> bool:
    """Whether an array or a group lies at an address. FeedError: the store cannot be read."""
    return StoredZarr(False, options).is_zarr(_folder(address))


def place_in_store(address: str, options: OpenOptions) -> tuple[StoredZarr, Url]:
    """Where an array or a group lies, and its address without a slash at the end."""
    return StoredZarr(options.missing_chunks == "fill", options.store), _folder(address)


def _folder(address: str) -> Url:
    url = Url.parse(address)
    return Url(url.base, url.key.removesuffix("/"))


class StoredZarr:
    """A `Place` in a store.

    Args:
      fill: as of a `ZarrArray`.
      options: cache and patience.

    Attributes:
      versions: of the metadata that were read.
    """

    def __init__(self, fill: bool, options: Store | None) -> None:
        self._fill, self._options = fill, options or Store()
        self._objects = ManyObjects(self._options)
        self.versions: dict[str, Version] = {}

    def array(self, url: Url) -> RemoteZarrArray:
        """An open array."""
        mark = next(mark for mark in self._marks(url) if mark in (".zarray", "zarr.json"))
        data = self._read(url.below(mark))
        return RemoteZarrArray(url, mark, data, self.versions[str(url.below(mark))], self._fill, self._options)

    def is_array(self, url: Url) -> bool:
        """Whether it is an array, and no group."""
        marks = self._marks(url)
        if "zarr.json" not in marks:
            return ".zarray" in marks
        path = url.below("zarr.json")
        return says_array(parsed_metadata(self._read(path), path), path)

    def members(self, url: Url) -> dict[str, Url]:
        """The arrays and groups that lie in a group, by name."""
        names = folders(url, self._options) if url.can_list else self._consolidated(url)
        children = {name: url.below(name) for name in sorted(names)}
        self._ask([child.below(mark) for child in children.values() for mark in MARKS])
        return {name: child for name, child in children.items() if self._marks(child)}

    def is_zarr(self, url: Url) -> bool:
        """Whether there is an array or a group."""
        return bool(self._marks(url))

    def _marks(self, url: Url) -> list[str]:
        """The metadata objects of an array or a group."""
        asked = [url.below(mark) for mark in MARKS]
        if not any(str(each) in self.versions for each in asked):
            self._ask(asked)
        return [mark for mark, each in zip(MARKS, asked, strict=True) if str(each) in self.versions]

    def _ask(self, urls: list[Url]) -> None:
        for url, version in zip(urls, self._objects.versions(urls), strict=True):
            if version is not None:
                self.versions[str(url)] = version

    def _read(self, url: Url) -> bytes:
        return self._objects.read([whole(url, self.versions[str(url)])])[0]

    def _consolidated(self, url: Url) -> set[str]:
        """The names of the members of a group, as its consolidated metadata give them.

        Raises:
          ValueError: there are none.
        """
        found: Any = {}
        if "zarr.json" in self._marks(url):
            mark = url.below("zarr.json")
            found = parsed_metadata(self._read(mark), mark).get("consolidated_metadata")
        else:
            mark = url.below(_CONSOLIDATED)
            self._ask([mark])
            if str(mark) in self.versions:
                found = json.loads(self._read(mark))
        if not isinstance(found, dict) or not isinstance(found.get("metadata"), dict):
            raise ValueError(
                "a web server does not list its files, so the metadata of a Zarr group must be consolidated, and "
                f"those of {url} are not; call zarr.consolidate_metadata(path) where it was written, open the "
                "arrays of the group by their own addresses, or open it in s3:// or gs://"
            )
        return {name.partition("/")[0] for name in found["metadata"] if not name.startswith((".", "zarr.json"))}


class _Shards:
    """How chunks lie in shards. https://zarr-specs.readthedocs.io: sharding-indexed codec.

    Args:
      metadata: of an array of version 3, whose only codec is the one of shards.

    Attributes:
      plain: the metadata of the same array without shards: a chunk is then what it is within a shard.
    """

    def __init__(self, metadata: dict[str, Any], path: str) -> None:
        self._path = path
        codec = metadata["codecs"][0]["configuration"]
        outer, inner = metadata["chunk_grid"]["configuration"]["chunk_shape"], codec["chunk_shape"]
        inner_codecs = [each["name"] for each in codec["codecs"]]
        if len(metadata["codecs"]) > 1 or "sharding_indexed" in inner_codecs:
            raise ValueError(
                f"{path}: of an array in a store, shards must be the only codec, and must not lie in shards; "
                "write it again, or copy it to a local disk"
            )
        self._counts = tuple(a // b for a, b in zip(outer, inner, strict=True))
        self._index_codecs = codec["index_codecs"]
        self._at_end = codec.get("index_location", "end") == "end"
        checksums = sum(each["name"] == "crc32c" for each in self._index_codecs)
        self._index_bytes = 16 * math.prod(self._counts) + 4 * checksums
        if self._index_bytes > memory_bytes():
            raise ValueError(f"{path}: the index of a shard takes {self._index_bytes} bytes; write smaller shards")
        self.plain = copy.deepcopy(metadata)
        self.plain["codecs"] = codec["codecs"]
        self.plain["chunk_grid"]["configuration"]["chunk_shape"] = inner

    def shard_of(self, corner: Corner) -> Corner:
        """The shard of a chunk."""
        return tuple(at // count for at, count in zip(corner, self._counts, strict=True))

    def index_at(self, size: int) -> tuple[int, int]:
        """Where the index lies in a shard of this size."""
        start = max(0, size - self._index_bytes) if self._at_end else 0
        return start, min(size, start + self._index_bytes)

    def index(self, data: bytes) -> Array:
        """uint64[*chunks of the shard, 2]: offset and length of each chunk. ValueError: damaged."""
        metadata = {
            "zarr_format": 3, "node_type": "array", "shape": [*self._counts, 2], "data_type": "uint64",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*self._counts, 2]}},
            "chunk_key_encoding": {"name": "default"}, "fill_value": _NONE, "codecs": self._index_codecs,
        }  # fmt: skip
        key = "/".join(["c", *("0" for _ in range(len(self._counts) + 1))])
        found = decoded("zarr3", "zarr.json", json.dumps(metadata).encode(), {key: data}, (), True)
        return np.asarray(found, np.uint64)

    def place(self, index: Array, corner: Corner, size: int) -> tuple[int, int] | None:
        """Start and stop of a chunk in its shard; None: it has none. ValueError: it lies outside of the shard."""
        within = tuple(at % count for at, count in zip(corner, self._counts, strict=True))
        offset, length = index[within].tolist()
        if offset == length == _NONE:
            return None
        if offset + length > size:
            raise ValueError(f"{self._path}: a shard of {size} bytes names bytes beyond it; write it again")
        return offset, offset + length


class RemoteZarrArray(ZarrArray):
    """A `ZarrArray` in a store: feedline fetches the chunks, and TensorStore decodes them from memory.

    Args:
      url: of its folder.
      name: of its metadata object.
      data, version: of that object.
      fill: a missing chunk has the fill value of the metadata, instead of being an error.
      options: cache and patience.

    Raises:
      ValueError, TypeError: the metadata cannot be read, or do not describe rows of numbers.
    """

    def __init__(self, url: Url, name: str, data: bytes, version: Version, fill: bool, options: Store) -> None:
        self._path = str(url)
        self._name = name
        self._driver = "zarr3" if name == "zarr.json" else "zarr"
        self._objects = KeyedObjects(url, name, version, options)
        self._indices: dict[str, Array] = {}
        """Of shards, by their keys; the one that was used last at the end. Used by the fetching thread only."""
        self._reading = Shared[Array]()
        metadata = parsed_metadata(data, f"{url}/{name}")
        self._fills = fill and metadata.get("fill_value") is not None
        try:
            self._store = _open(self._driver, name, data, {}, self._fills)
            self._check(name)
            codecs = [each["name"] for each in metadata.get("codecs", ()) if isinstance(each, dict)]
            sharded = self._driver == "zarr3" and "sharding_indexed" in codecs
            self._shards = _Shards(metadata, self._path) if sharded else None
        except (KeyError, TypeError) as error:
            if isinstance(error, TypeError) and "an accelerator holds" in str(error):
                raise
            raise ValueError(f"{url} cannot be read as a Zarr array: {error!r}; write it again") from error
        except ValueError as error:
            if str(error).startswith(self._path):
                raise
            raise ValueError(f"{url} cannot be read as a Zarr array: {error}; write it again") from error
        self._plain = data if self._shards is None else json.dumps(self._shards.plain).encode()
        self._chunk = tuple(self._store.chunk_layout.read_chunk.shape)
        self._keys = _key_form(metadata, self._driver)

    def fetch_ahead(self, rows: Sequence[int], count: int, ahead: int) -> bool:
        """Start to fetch the chunks of the `count` rows from each of `rows` on. False: it is too early."""
        slices = [slice(row, min(row + count, self.shape[0])) for row in rows]
        corners = list(dict.fromkeys(corner for some in slices for corner in self._corners(some)))
        size = math.prod(self._chunk) * self.dtype.itemsize
        return self._objects.fetch_ahead(corners, self._bytes_of, size, ahead)

    def close(self) -> None:
        """Give up what is being fetched ahead."""
        self._objects.close()

    def _read(self, rows: slice) -> Array:
        corners = self._corners(rows)
        found = dict(zip(corners, self._objects.read(corners, self._bytes_of), strict=True))
        chunks = {self._key(corner): data for corner, data in found.items() if data is not None}
        if len(chunks) < len(corners) and not self._fills:
            missing = self._key(next(corner for corner, data in found.items() if data is None))
            raise missing_error(f"{self._path}/{missing} is not")
        return decoded(self._driver, self._name, self._plain, chunks, (rows,), self._fills)

    def _corners(self, rows: slice) -> list[Corner]:
        """The chunks of some rows, by their places in the grid of chunks."""
        axes = [range(rows.start // self._chunk[0], -(-rows.stop // self._chunk[0]))]
        axes += [range(-(-length // chunk)) for length, chunk in zip(self.shape[1:], self._chunk[1:], strict=True)]
        return list(itertools.product(*axes))

    def _key(self, corner: Corner) -> str:
        prefix, separator = self._keys
        return prefix + separator.join(map(str, corner))

    async def _bytes_of(self, corner: Corner) -> bytes | None:
        """A chunk as it is stored; None: there is none."""
        if self._shards is None:
            key = self._key(corner)
            size = await self._objects.size(key)
            return None if size is None else await self._objects.part(key, 0, size)
        key = self._key(self._shards.shard_of(corner))
        size = await self._objects.size(key)
        if size is None:
            return None
        index = await self._index(key, size)
        place = self._shards.place(index, corner, size)
        return None if place is None else await self._objects.part(key, *place)

    async def _index(self, key: str, size: int) -> Array:
        """Of a shard of this size. The latest ones are kept; the others lie in the cache on disk."""
        found = self._indices.pop(key, None)
        if found is None:
            found = await self._reading.once(key, functools.partial(self._read_index, key, size))
        self._indices[key] = found
        if len(self._indices) > 1 and len(self._indices) * found.nbytes > _INDICES_BYTES:
            self._indices.pop(next(iter(self._indices)))
        return found

    async def _read_index(self, key: str, size: int) -> Array:
        assert self._shards is not None
        return self._shards.index(await self._objects.part(key, *self._shards.index_at(size)))


def _key_form(metadata: dict[str, Any], driver: str) -> tuple[str, str]:
    """The beginning of the keys of chunks, and what separates their numbers."""
    if driver == "zarr":
        return "", metadata.get("dimension_separator", ".")
    encoding = metadata.get("chunk_key_encoding", {"name": "default"})
    given = encoding.get("configuration", {})
    if encoding["name"] == "v2":
        return "", given.get("separator", ".")
    separator = given.get("separator", "/")
    return f"c{separator}", separator


def _open(driver: str, name: str, metadata: bytes, chunks: dict[str, bytes], fills: bool) -> Any:
    """An array of which TensorStore has these chunks in memory."""
    tensorstore = extras.require("tensorstore", "zarr")
    context = tensorstore.Context()  # whose memory no other read sees
    memory = result_in_python(tensorstore.KvStore.open({"driver": "memory"}, context=context))
    for key, data in {name: metadata, **chunks}.items():
        result_in_python(memory.write(key, data))
    spec = {"driver": driver, "kvstore": {"driver": "memory"}, "fill_missing_data_reads": fills}
    return result_in_python(tensorstore.open(spec, open=True, read=True, context=context))


def decoded(
    driver: str, name: str, metadata: bytes, chunks: dict[str, bytes], part: tuple[slice, ...], fills: bool
) -> Array:
    """A part of an array of which these chunks are there, contiguous in memory. ValueError: one is damaged."""
    store = _open(driver, name, metadata, chunks, fills)
    return np.ascontiguousarray(result_in_python(store[part].read()))
