"""Zarr arrays and groups of versions 2 and 3, also with shards, in groups of rows: each is a row of chunks.

TensorStore decodes the chunks. On a local disk it reads them itself. In a store, chunks come through the cache (of
a shard only those that are needed), and TensorStore reads them from memory.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.files.file import changed
from feedline._src.files.folder import Folder, Part, open_folder
from feedline._src.files.store import Store
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, require
from feedline._src.formats.table import Column, Grouped, check_lengths, memory_bytes
from feedline._src.rows import digests
from feedline._src.rows.bad_rows import raise_of_signal_handler
from feedline._src.rows.shards import EvenLengths
from feedline._src.rows.spec import is_numeric

Array = npt.NDArray[Any]
Corner = tuple[int, ...]
"""The place of a chunk or shard in the grid of all."""
T = TypeVar("T")
_MARKS = ("zarr.json", ".zarray", ".zgroup")
_INDICES_BYTES = 1 << 26
_INDEX_ENTRY_BYTES = 16  # in the index of a shard: offset and length of a chunk
_NO_CHUNK = (1 << 64) - 1  # offset and length of one that is not there


def is_zarr(address: str, store: Store | None = None) -> bool:
    """Whether a Zarr array or group lies at a path or address. FeedError: the store cannot be read."""
    return bool(ZarrFolder(address, store).marks(""))


class ZarrFolder:
    """An array or a group in a folder: what a `File` is for formats whose rows lie in files.

    It pickles with the versions of its metadata and, once known, its identity, which the other process compares.

    Args:
      name: path or address.
      store: how objects are read.
      versions, identity: that it must have.
    """

    def __init__(
        self,
        name: str,
        store: Store | None = None,
        versions: Mapping[str, Any] | None = None,
        identity: list[Any] | None = None,
    ) -> None:
        self.name, self._store, self.identity = name, store, identity
        self.folder = open_folder(name, store, versions)
        self._metadata: set[str] = set()

    def marks(self, at: str) -> list[str]:
        """The metadata files of the array or group in a folder below it."""
        sizes = self.folder.sizes([_join(at, mark) for mark in _MARKS])
        return [mark for mark, size in zip(_MARKS, sizes, strict=True) if size is not None]

    def metadata(self, file: str) -> bytes:
        """The bytes of a file of metadata."""
        data = self.folder.read([Part(file)])[0]
        if data is None:
            raise changed(self.folder.path_of(file), "it cannot be found any more")
        self._metadata.add(file)
        return data

    def members(self, at: str) -> dict[str, str]:
        """The arrays and groups in a group: their folders by their names."""
        names = self.folder.folders(at) if self.folder.can_list else sorted(self._consolidated(at))
        self.folder.sizes([_join(at, f"{name}/{mark}") for name in names for mark in _MARKS])  # all asked at once
        return {name: _join(at, name) for name in names if self.marks(_join(at, name))}

    def check(self) -> None:
        """Refuse, with a FeedError, metadata that have changed. In a store they are kept as they were read."""
        if not self.folder.in_store:
            self.folder.check(sorted(self._metadata))

    def _consolidated(self, at: str) -> set[str]:
        """The names of the members of a group, as its consolidated metadata give them.

        Raises:
          ValueError: there are none.
        """
        if "zarr.json" in self.marks(at):
            found = _parsed(self.metadata(file := _join(at, "zarr.json")), file).get("consolidated_metadata")
        else:
            data = self.folder.read([Part(file := _join(at, ".zmetadata"))])[0]
            found = {} if data is None else _parsed(data, file)
        if not isinstance(found, dict) or not isinstance(found.get("metadata"), dict):
            raise ValueError(
                "a web server does not list its files, so the metadata of a Zarr group must be consolidated, and "
                f"those of {self.folder.path_of(at)} are not; call zarr.consolidate_metadata(path) where it was "
                "written, open the arrays of the group by their own addresses, or open it in s3:// or gs://"
            )
        return {name.partition("/")[0] for name in found["metadata"] if not name.startswith((".", "zarr.json"))}

    def __reduce__(self) -> Any:
        versions = {file: self.folder.versions[file] for file in self._metadata}
        return ZarrFolder, (self.folder.place, self._store, versions, self.identity)


class ZarrFolders(Sequence[ZarrFolder]):
    """The folders of a source by their numbers: what `Files` are for formats whose rows lie in files."""

    in_store = False  # what is in a store is fetched by the format

    def __init__(self, paths: Sequence[str], store: Store | None = None) -> None:
        self.paths = list(paths)
        self._folders = [ZarrFolder(path, store) for path in paths]

    def __len__(self) -> int:
        return len(self._folders)

    def __getitem__(self, number: Any) -> Any:
        return self._folders[number]

    def opened(self, number: int, open_file: Callable[[ZarrFolder], T]) -> T:
        """What `open_file` makes of a folder, which must not change meanwhile."""
        try:
            return open_file(self._folders[number])
        finally:
            self._folders[number].check()  # a change explains an error better

    def close(self) -> None:
        """Do nothing: what was opened is closed by itself."""


def open_zarr(place: ZarrFolder, options: OpenOptions) -> Grouped:
    """The chunks of an array, or of the arrays of a group as a dict, along their first axis.

    Raises:
      FileNotFoundError, ValueError, TypeError: it cannot be read, or not as rows.
      FeedError: it is not what another process read; or a store cannot be read.
    """
    if not place.marks(""):
        raise FileNotFoundError(
            f"{place.name} is no Zarr array or group: it has none of {', '.join(_MARKS)}; check the path"
        )
    tree = _opened(place, options)
    arrays: list[_Array] = jax.tree.leaves(tree)

    def identity(allow_bad_rows: bool) -> list[Any]:
        for array in arrays:
            array.will_read([slice(row, row + 1) for row in digests.sampled_numbers(array.rows)], 0)
        failures: list[RowError] = []
        place.identity = found = [_sampled_rows(array, failures) for array in arrays]
        if failures and not allow_bad_rows:
            raise failures[0]
        return found

    def will_read(leaf: int, groups: Sequence[int], ahead: int) -> bool:
        return arrays[leaf].will_read([arrays[leaf].rows_of(group) for group in groups], ahead)

    if (known := place.identity) is not None and identity(allow_bad_rows=True) != known:
        raise FeedError(
            "the chunks of a Zarr array must not change while a feed reads it, and rows sampled when the feed was "
            "built differ now. Write new data to a new path, and build a new feed",
            stage="read",
            file=place.name,
        )
    return Grouped(
        jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), tree),
        [EvenLengths(array.rows, array.height) for array in arrays],
        lambda leaf, group: Column(arrays[leaf].read(arrays[leaf].rows_of(group))),
        identity=identity,
        will_read=will_read if place.folder.in_store else None,
        close=place.folder.close,
    )


FORMAT = Format(
    "zarr",
    (".zarr",),
    takes=frozenset({"columns", "cache_bytes", "missing_chunks"}),
    extra="zarr",
    open=open_zarr,
    files=ZarrFolders,
)


def _sampled_rows(array: _Array, failures: list[RowError]) -> list[Any]:
    """A digest of some rows. The errors of rows that cannot be read are appended to `failures`."""

    def row_at(row: int) -> Any:
        try:
            return array.read(slice(row, row + 1))[0]
        except ValueError as error:
            raise_of_signal_handler(error)
            array.place.check()
            failures.append(RowError(str(error), stage="read", row=row, file=array.path))
            failures[-1].__cause__ = error
            return np.empty(0, np.uint8)

    return digests.of_rows(array.dtype, array.shape, row_at)


def _opened(place: ZarrFolder, options: OpenOptions) -> Any:
    """An open array, in a dict if it is given a name; or a dict of the chosen arrays of a group.

    Raises:
      ValueError: the arrays differ in length or are no rows; the error lists them, and some that fit together.
    """
    fill = options.missing_chunks == "fill"
    if isinstance(found := _node(place, "", fill), _Array):
        return options.named(found, place.name)
    tree: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name in options.chosen(list(found), place.name) if found else []:
        try:
            tree[name] = _tree(place, found[name], fill)
        except (ValueError, TypeError) as error:
            refused[name] = str(error)
    check_lengths(tree, refused, "a Zarr group", "array", place.name)
    return tree


def _tree(place: ZarrFolder, at: str, fill: bool) -> Any:
    """An open array, or a dict of the arrays of a group; a group in the group is a dict in the dict."""
    found = _node(place, at, fill)
    return found if isinstance(found, _Array) else {name: _tree(place, found[name], fill) for name in found}


def _node(place: ZarrFolder, at: str, fill: bool) -> _Array | dict[str, str]:
    """An open array, or the members of a group."""
    marks = place.marks(at)
    if "zarr.json" in marks:
        path = place.folder.path_of(file := _join(at, "zarr.json"))
        kind = _parsed(place.metadata(file), path).get("node_type")
        if kind not in ("array", "group"):
            raise ValueError(f"{path}: node_type must be array or group, got {kind!r}; write it again")
        return _Array(place, at, "zarr.json", fill) if kind == "array" else place.members(at)
    return _Array(place, at, ".zarray", fill) if ".zarray" in marks else place.members(at)


class _Array:
    """An open array.

    Attributes:
      height: the rows of a chunk.

    Args:
      at: its folder in `place`.
      mark: the name of its metadata file.
      fill: a missing chunk has the fill value of the metadata, instead of being an error.

    Raises:
      ValueError, TypeError: the metadata cannot be read, or do not describe rows of numbers.
    """

    def __init__(self, place: ZarrFolder, at: str, mark: str, fill: bool) -> None:
        self.place, self._at, self._mark = place, at, mark
        self.path = place.folder.path_of(at) if at else place.name
        self._driver = "zarr3" if mark == "zarr.json" else "zarr"
        self._plain = place.metadata(_join(at, mark))
        """The metadata, of a sharded array those without shards: a chunk is then what it is within a shard."""
        metadata = _parsed(self._plain, f"{self.path}/{mark}")
        self._fills = fill and metadata.get("fill_value") is not None
        self._absent: set[str] = set()
        """Chunks that are known to have never been there."""
        try:
            self._tensor = self._open({})
        except ValueError as error:
            raise ValueError(f"{self.path} cannot be read as a Zarr array: {error}; write it again") from error
        self._check_rows()
        self.shape, self.dtype = tuple(self._tensor.shape), np.dtype(self._tensor.dtype.numpy_dtype)
        self._chunk = tuple(self._tensor.chunk_layout.read_chunk.shape)
        self.rows, self.height = self.shape[0], max(1, self._chunk[0])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._check_memory()
        self._key_form = _key_form(metadata, self._driver)
        self._shards: _Shards | None = None
        codecs = metadata.get("codecs", ()) if self._driver == "zarr3" else ()
        if place.folder.in_store and "sharding_indexed" in [codec["name"] for codec in codecs]:
            self._shards = _Shards(metadata, self._file, self.path, place.folder)
            self._plain = json.dumps(self._shards.plain).encode()

    def rows_of(self, group: int) -> slice:
        """The rows of a row of chunks."""
        return slice(group * self.height, min((group + 1) * self.height, self.rows))

    def read(self, rows: slice) -> Array:
        """Some rows, contiguous in memory.

        Raises:
          ValueError: a chunk is missing or damaged.
          FeedError: it changed in a store, which cannot be read.
        """
        tensor = self._fetched(rows) if self.place.folder.in_store else self._tensor
        try:
            return np.ascontiguousarray(_result(tensor[rows].read()))
        except ValueError as error:
            if "NOT_FOUND" not in str(error):
                raise
            raise ValueError(
                f"every chunk must be there, and one is not: {error}. Restore the chunk; or, if the writer left "
                'out chunks that hold only the fill value, pass missing_chunks="fill" to open_source (the '
                "metadata must have a fill value)"
            ) from error

    def will_read(self, rows: Iterable[slice], ahead: int) -> bool:
        """Begin to fetch the chunks of some rows. See `Folder.will_read`."""
        folder = self.place.folder
        if not folder.in_store:
            return True
        corners = list(dict.fromkeys(corner for some in rows for corner in self._corners(some)))
        if self._shards is not None and (unread := self._shards.unread(corners)):
            begun = folder.will_read(unread, ahead, self._shards.index_bytes)
            absent = [folder.versions.get(str(part.file), 0) is None for part in unread]
            if not all(gone or folder.cached(part) is not None for part, gone in zip(unread, absent, strict=True)):
                return begun and ahead == 0  # else once the indices have come
        parts = [part for part in self._parts(corners) if part is not None]
        return folder.will_read(parts, ahead, math.prod(self._chunk) * self.dtype.itemsize)

    def _fetched(self, rows: slice) -> Any:
        """The tensor, with the chunks of some rows in memory."""
        corners = self._corners(rows)
        parts = dict(zip(map(self._key, corners), self._parts(corners), strict=True))
        there = {key: part for key, part in parts.items() if part is not None}
        found = zip(there, self.place.folder.read(list(there.values())), strict=True)
        chunks = {key: data for key, data in found if data is not None}
        if absent := parts.keys() - chunks.keys() - self._absent:
            self.place.folder.check([_join(self._at, self._mark)])  # a bucket that is gone has no chunks either
            self._absent |= absent
        return self._open(chunks)

    def _parts(self, corners: Sequence[Corner]) -> Sequence[Part | None]:
        """Where the chunks lie; None: the shard has no such chunk."""
        if self._shards is None:
            return [Part(self._file(corner)) for corner in corners]
        return self._shards.parts(corners)

    def _corners(self, rows: slice) -> list[Corner]:
        """The chunks of some rows."""
        axes = [range(rows.start // self._chunk[0], -(-rows.stop // self._chunk[0]))]
        axes += [range(-(-length // chunk)) for length, chunk in zip(self.shape[1:], self._chunk[1:], strict=True)]
        return list(itertools.product(*axes))

    def _key(self, corner: Corner) -> str:
        prefix, separator = self._key_form
        return prefix + separator.join(map(str, corner))

    def _file(self, corner: Corner) -> str:
        return _join(self._at, self._key(corner))

    def _open(self, chunks: dict[str, bytes]) -> Any:
        """The tensor, of a folder in a store with these chunks in memory."""
        if self.place.folder.in_store:
            return _in_memory(self._driver, {self._mark: self._plain, **chunks}, self._fills)
        path = os.path.abspath(os.path.join(self.place.folder.place, self._at))
        kvstore = {"driver": "file", "path": f"{path}/"}
        return _tensor(self._driver, kvstore, self._fills)

    def _check_rows(self) -> None:
        """Refuse what is no rows of numbers."""
        if self._tensor.rank == 0:
            raise ValueError(f"{self.path}: an array needs a first axis that counts rows, got a scalar")
        if not is_numeric(self._tensor.dtype.numpy_dtype):
            raise TypeError(
                f"{self.path}: an accelerator holds numbers and booleans, got dtype {self._tensor.dtype.name}; "
                "encode it as numbers first"
            )

    def _check_memory(self) -> None:
        """Refuse sizes that TensorStore cannot allocate: it would abort the process, without an exception."""
        chunk, shard = self._chunk, self._tensor.chunk_layout.write_chunk.shape  # equal without shards
        item, row = self.dtype.itemsize, math.prod(self.shape[1:])
        needs = {
            "a row of its chunks": min(self.height, self.rows) * row * item,
            "one of its chunks": math.prod(chunk) * item,
            "the index of one of its shards": math.prod(shard) // max(1, math.prod(chunk)) * _INDEX_ENTRY_BYTES,
        }
        has = memory_bytes()
        for what, needed in needs.items():
            if needed > has:
                raise ValueError(
                    f"{self.path}: {what} must fit into memory, and takes {needed} bytes of the {has} there are "
                    f"(shape {self.shape}, chunks {chunk}, {self.dtype}). Write it again in smaller chunks if "
                    f"{self._mark} is not damaged"
                )


class _Shards:
    """Where chunks lie in the shards of a folder. https://zarr-specs.readthedocs.io: sharding-indexed codec.

    Attributes:
      plain: the metadata of the array without shards: a chunk is then what it is within a shard.
      index_bytes: the size of the index of a shard.

    Args:
      metadata: of the array. Shards must be its only codec.
      file_of: (place of a shard) → its name.
    """

    def __init__(
        self, metadata: dict[str, Any], file_of: Callable[[Corner], str], path: str, folder: Folder
    ) -> None:
        self._file_of, self._folder = file_of, folder
        codec = metadata["codecs"][0]["configuration"]
        if len(metadata["codecs"]) > 1 or any(each["name"] == "sharding_indexed" for each in codec["codecs"]):
            raise ValueError(
                f"{path}: of an array in a store, shards must be the only codec, and must not lie in shards; "
                "write it again, or copy it to a local disk"
            )
        self.plain = copy.deepcopy(metadata)
        self.plain["codecs"] = codec["codecs"]
        grid = self.plain["chunk_grid"]["configuration"]
        self._counts = tuple(a // b for a, b in zip(grid["chunk_shape"], codec["chunk_shape"], strict=True))
        grid["chunk_shape"] = codec["chunk_shape"]
        self._codecs = codec["index_codecs"]
        checksums = sum(each["name"] == "crc32c" for each in self._codecs)
        self.index_bytes = _INDEX_ENTRY_BYTES * math.prod(self._counts) + 4 * checksums
        at_end = codec.get("index_location", "end") == "end"
        self._index_at = (-self.index_bytes, None) if at_end else (0, self.index_bytes)
        self._lock = threading.Lock()
        self._indices: dict[Corner, Array] = {}
        """By shard, uint64[*chunks of it, 2]: offset and length of each. Guarded by _lock."""

    def unread(self, corners: Iterable[Corner]) -> list[Part]:
        """The indices that the chunks need, and that are not in memory."""
        shards = dict.fromkeys(map(self._shard_of, corners))
        return [self._index_part(shard) for shard in shards if shard not in self._indices]

    def parts(self, corners: Sequence[Corner]) -> list[Part | None]:
        """Where chunks lie; None: there is no such chunk. ValueError: an index is damaged."""
        shards = dict.fromkeys(map(self._shard_of, corners))
        with self._lock:
            found: dict[Corner, Array | None] = {shard: self._indices.get(shard) for shard in shards}
        unread = [shard for shard, index in found.items() if index is None]
        for shard, data in zip(unread, self._folder.read([*map(self._index_part, unread)]), strict=True):
            found[shard] = None if data is None else self._decoded(data)
        with self._lock:
            self._indices |= {shard: index for shard, index in found.items() if index is not None}
            while len(self._indices) > 1 and len(self._indices) * self.index_bytes > _INDICES_BYTES:
                del self._indices[next(iter(self._indices))]
        return [self._part(found[self._shard_of(corner)], corner) for corner in corners]

    def _part(self, index: Array | None, corner: Corner) -> Part | None:
        within = tuple(at % count for at, count in zip(corner, self._counts, strict=True))
        offset, length = (_NO_CHUNK, _NO_CHUNK) if index is None else index[within].tolist()
        file = self._file_of(self._shard_of(corner))
        return None if offset == length == _NO_CHUNK else Part(file, offset, offset + length)

    def _shard_of(self, corner: Corner) -> Corner:
        return tuple(at // count for at, count in zip(corner, self._counts, strict=True))

    def _index_part(self, shard: Corner) -> Part:
        return Part(self._file_of(shard), *self._index_at)

    def _decoded(self, data: bytes) -> Array:
        shape = [*self._counts, 2]
        metadata = {
            "zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "uint64", "codecs": self._codecs,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
            "chunk_key_encoding": {"name": "default"}, "fill_value": 0,
        }  # fmt: skip
        key = "/".join(["c", *("0" for _ in shape)])
        tensor = _in_memory("zarr3", {"zarr.json": json.dumps(metadata).encode(), key: data}, False)
        return np.asarray(_result(tensor.read()))


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


def _join(at: str, name: str) -> str:
    return f"{at}/{name}" if at else name


def _parsed(data: bytes, path: object) -> dict[str, Any]:
    """The JSON object in the bytes of a metadata file. ValueError if there is none."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError(f"it must be a JSON object, and is a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as the metadata of Zarr: {error}; write it again") from error
    return found


def _in_memory(driver: str, files: dict[str, bytes], fills: bool) -> Any:
    """An array of which TensorStore has the files in memory."""
    tensorstore = require("tensorstore", "zarr")
    context = tensorstore.Context()  # whose memory no other read sees
    memory = _result(tensorstore.KvStore.open({"driver": "memory"}, context=context))
    for key, data in files.items():
        _result(memory.write(key, data))
    return _tensor(driver, {"driver": "memory"}, fills, context=context)


def _tensor(driver: str, kvstore: dict[str, str], fills: bool, **context: Any) -> Any:
    tensorstore = require("tensorstore", "zarr")
    spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": fills}
    return _result(tensorstore.open(spec, open=True, read=True, **context))


def _result(future: Any) -> Any:
    """The result of a TensorStore future, waited for in Python.

    A wait inside TensorStore would abort the process if the interpreter ends meanwhile ("terminate called without
    an active exception"): CPython then ends the waiting thread inside C++ code that does not allow this.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    return future.result()
