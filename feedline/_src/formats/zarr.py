"""Zarr arrays and Zarr groups, versions 2 and 3. They are read in groups of rows; each group is a row of chunks.

TensorStore decodes chunks, and finds them in shards. It reads local files itself. From a store, files are fetched
whole through the cache, and TensorStore reads them from memory. So if an array in a store has shards, a group of
rows is a row of shards.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.files.file import changed
from feedline._src.files.folder import folder_at
from feedline._src.files.store import Store
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format, Library
from feedline._src.formats.table import Column, Grouped, check_memory, check_same_rows, even_groups
from feedline._src.rows.spec import is_numeric

Array = npt.NDArray[Any]
T = TypeVar("T")
_MARKS = ("zarr.json", ".zarray", ".zgroup")  # the files of metadata
_MOST_FILES = 1 << 13  # the most that are read at once from a store, since damaged metadata may promise millions
_INDEX_ENTRY_BYTES = 16  # in the index of a shard: offset and length of a chunk
tensorstore: Any = Library("tensorstore", "zarr")


def is_zarr(address: str, store: Store | None = None) -> bool:
    """Whether a Zarr array or group lies at a path or address. Raises FeedError if the store cannot be read."""
    return bool(ZarrFolder(address, store).marks(""))


class ZarrFolder:
    """An array or a group in a folder. Used in place of a `File`, since its rows lie in many files.

    It is pickled with the versions of its metadata files. The process that unpickles it refuses other versions.
    """

    def __init__(self, name: str, store: Store | None = None, versions: Mapping[str, Any] | None = None) -> None:
        self.name, self._store = name, store
        self.folder = folder_at(name, store, versions)

    def marks(self, at: str) -> list[str]:
        """The names of the metadata files in the folder `at`; none if the folder is neither array nor group."""
        found = self.folder.read([_join(at, mark) for mark in _MARKS])
        return [mark for mark, data in zip(_MARKS, found, strict=True) if data is not None]

    def metadata(self, file: str) -> dict[str, Any]:
        """Read the JSON object in a metadata file."""
        path, data = self.folder.path_of(file), self.folder.read([file])[0]
        if data is None:
            raise changed(path, "it cannot be found any more")
        try:
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError(f"it must be a JSON object, and is a {type(found).__name__}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as the metadata of Zarr: {error}; write it again") from error
        return found

    def members(self, at: str) -> dict[str, str]:
        """The arrays and groups in the group at `at`: their folders, by their names."""
        if not self.folder.can_list:
            raise ValueError(
                f"a web server does not list the arrays of a Zarr group, such as {self.folder.path_of(at)}; open "
                "an array by its own address, or the group in s3://, gs:// or az://"
            )
        names = self.folder.folders(at)
        self.folder.read([_join(at, f"{name}/{mark}") for name in names for mark in _MARKS])  # all at once
        return {name: _join(at, name) for name in names if self.marks(_join(at, name))}

    def check(self) -> None:
        """Raise FeedError if metadata changed on the disk. Metadata from a store is kept as it was read."""
        if not self.folder.in_store:
            self.folder.check(sorted(self._versions))

    @property
    def _versions(self) -> dict[str, Any]:
        """The versions of the metadata files that were read."""
        found = self.folder.versions.items()
        return {file: version for file, version in found if version and file.rpartition("/")[2] in _MARKS}

    def __reduce__(self) -> Any:
        return ZarrFolder, (self.folder.place, self._store, self._versions)


class ZarrFolders(list[ZarrFolder]):
    """The folders of a source, by number. Used in place of `Files`."""

    in_store = False  # in a store, too: the format itself fetches the files
    digests = None  # the source makes its digest from sampled rows

    def __init__(self, paths: Sequence[str], store: Store | None = None) -> None:
        super().__init__(ZarrFolder(path, store) for path in paths)
        self.paths = list(paths)

    def opened(self, number: int, open_file: Callable[[ZarrFolder], T]) -> T:
        """Return the result of `open_file` for a folder. FeedError: the folder's metadata changed."""
        try:
            return open_file(self[number])
        finally:
            self[number].check()  # if the folder changed, this explains an error better than TensorStore does

    def close(self) -> None:
        """Cancel requests in flight."""
        for each in self:
            each.folder.close()


def open_zarr(place: ZarrFolder, options: OpenOptions) -> Grouped:
    """Describe an array, or the arrays of a group as a dict. Chunks along the first axis make groups of rows."""
    if not place.marks(""):
        raise FileNotFoundError(
            f"{place.name} is no Zarr array or group: it has none of {', '.join(_MARKS)}; check the path"
        )
    tree = _tree(place, "", options)
    if isinstance(tree, _Array):
        tree = options.named(tree, place.name)
    arrays: list[_Array] = jax.tree.leaves(tree)
    check_same_rows({array.path: array.rows for array in arrays}, place.name)

    def will_read(leaf: int, groups: Sequence[int], ahead: int) -> bool:
        return arrays[leaf].will_read(groups, ahead)

    return Grouped(
        jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), tree),
        [even_groups(array.rows, array.height, array.path) for array in arrays],
        lambda leaf, group: Column(arrays[leaf].read(group)),
        will_read=will_read if place.folder.in_store else None,
    )


_OPTIONS = frozenset({"columns", "cache_bytes", "missing_chunks"})
FORMAT = Format("zarr", (".zarr",), _OPTIONS, extra="zarr", open=open_zarr, files=ZarrFolders)


def _tree(place: ZarrFolder, at: str, options: OpenOptions) -> Any:
    """Open an array, or the arrays of a group as a nested dict; of the topmost group, only the chosen members."""
    mark = place.marks(at)[0]
    metadata = {} if mark == ".zgroup" else place.metadata(_join(at, mark))
    if mark == ".zarray" or metadata.get("node_type") == "array":
        return _Array(place, at, mark, metadata, options.missing_chunks == "fill")
    if mark == "zarr.json" and metadata.get("node_type") != "group":
        path, kind = place.folder.path_of(_join(at, mark)), metadata.get("node_type")
        raise ValueError(f"{path}: node_type must be array or group, got {kind!r}; write it again")
    members = place.members(at)
    names = list(members) if at else options.chosen(list(members), place.name)
    return {name: _tree(place, members[name], options) for name in names}


class _Array:
    """An array in the folder `at` of a `ZarrFolder`. The file `mark` holds its `metadata`.

    Attributes:
      height: how many rows are read at once: the rows of a chunk, or, in a store, of a file.
    """

    def __init__(self, place: ZarrFolder, at: str, mark: str, metadata: dict[str, Any], fill: bool) -> None:
        self._folder, self._at, self._mark, self._metadata = place.folder, at, mark, metadata
        self.path = place.folder.path_of(at) if at else place.name
        self._fills = fill and self._metadata.get("fill_value") is not None
        try:
            self._tensor = self._open({})
        except ValueError as error:
            raise ValueError(f"{self.path} cannot be read as a Zarr array: {error}; write it again") from error
        self.shape, self.dtype = tuple(self._tensor.shape), np.dtype(self._tensor.dtype.numpy_dtype)
        if not self.shape or not is_numeric(self.dtype):
            raise TypeError(
                f"{self.path}: an array needs a first axis that counts rows, and numbers or booleans, got "
                f"{self.dtype.name}{list(self.shape)}; leave it out with columns=[...], or write it again"
            )
        layout = self._tensor.chunk_layout
        inner, outer = math.prod(layout.read_chunk.shape), math.prod(layout.write_chunk.shape)
        self._chunk = tuple((layout.write_chunk if place.folder.in_store else layout.read_chunk).shape)
        self.rows, self.height = self.shape[0], max(1, self._chunk[0])
        self._chunk_bytes = math.prod(self._chunk) * self.dtype.itemsize
        group_bytes = min(self.height, self.rows) * math.prod(self.shape[1:]) * self.dtype.itemsize
        index_bytes = outer // max(1, inner) * _INDEX_ENTRY_BYTES
        check_memory(self.path, "a row of its chunks", max(self._chunk_bytes, group_bytes, index_bytes))
        files = math.prod(map(len, self._grid))
        if place.folder.in_store and files > _MOST_FILES:
            raise ValueError(
                f"{self.path}: in a store, a row of chunks or shards must have at most {_MOST_FILES:,} files, "
                f"and has {files:,}; write it again with larger chunks, or with shards"
            )

    @property
    def _grid(self) -> list[range]:
        """The numbers of the chunks along each axis after the first."""
        return [range(-(-length // chunk)) for length, chunk in zip(self.shape[1:], self._chunk[1:], strict=True)]

    def read(self, group: int) -> Array:
        """The rows of a group, contiguous in memory. Raises ValueError if a chunk is missing or damaged."""
        rows = slice(group * self.height, min((group + 1) * self.height, self.rows))
        tensor = self._open(self._fetched(group)) if self._folder.in_store else self._tensor
        try:
            return np.ascontiguousarray(_result(tensor[rows].read()))
        except ValueError as error:
            if "NOT_FOUND" not in str(error):
                raise
            raise ValueError(
                f"every chunk must be present, and one is not: {error}. Restore the chunk; or, if the writer left "
                'out chunks that hold only the fill value, pass missing_chunks="fill" to open_source (the '
                "metadata must have a fill value)"
            ) from error

    def will_read(self, groups: Sequence[int], ahead: int) -> bool:
        """Start fetching the files of some groups. See `Folder.will_read`."""
        files = [_join(self._at, key) for group in groups for key in self._keys(group)]
        return self._folder.will_read(files, ahead, self._chunk_bytes)

    def _fetched(self, group: int) -> dict[str, bytes]:
        """Fetch the files of a group from a store, by key. Files that do not exist are left out."""
        keys = self._keys(group)
        found = dict(zip(keys, self._folder.read([_join(self._at, key) for key in keys]), strict=True))
        if None in found.values():
            self._folder.check([_join(self._at, self._mark)])  # raises if the whole bucket is gone
        return {key: data for key, data in found.items() if data is not None}

    def _keys(self, group: int) -> list[str]:
        """The keys of the files of a group in a store."""
        prefix, separator = "", self._metadata.get("dimension_separator", ".")
        if self._mark == "zarr.json":
            encoding = self._metadata.get("chunk_key_encoding", {"name": "default"})
            is_default = encoding["name"] == "default"
            separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
            prefix = f"c{separator}" if is_default else ""
        return [prefix + separator.join(map(str, at)) for at in itertools.product([group], *self._grid)]

    def _open(self, files: dict[str, bytes]) -> Any:
        """Open the tensor. For an array in a store, the tensor reads `files` from memory."""
        context, kvstore = tensorstore.Context(), {"driver": "memory"}  # each context has its own memory
        if self._folder.in_store:
            memory = _result(tensorstore.KvStore.open(kvstore, context=context))
            for key, data in {self._mark: json.dumps(self._metadata).encode(), **files}.items():
                _result(memory.write(key, data))
        else:
            path = os.path.abspath(os.path.join(self._folder.place, self._at))
            kvstore = {"driver": "file", "path": f"{path}/"}
        driver = "zarr3" if self._mark == "zarr.json" else "zarr"
        spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": self._fills}
        return _result(tensorstore.open(spec, open=True, read=True, context=context))


def _join(at: str, name: str) -> str:
    return f"{at}/{name}" if at else name


def _result(future: Any) -> Any:
    """Wait in Python for a TensorStore future, and return its result.

    At exit, CPython ends waiting threads. If a thread waited inside TensorStore's C++ code, which does not allow
    this, the process would abort ("terminate called without an active exception").
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    return future.result()
