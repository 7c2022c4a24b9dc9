"""Zarr arrays and groups, read by TensorStore, as groups of rows, each of which is a row of chunks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.files.version import FileVersion
from feedline._src.formats import extras
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.formats.table import Grouped, NumberColumn, memory_bytes
from feedline._src.rows import digests
from feedline._src.rows.bad_rows import raise_of_signal_handler
from feedline._src.rows.shards import EvenLengths
from feedline._src.rows.spec import is_numeric
from feedline._src.stores.client import Version
from feedline._src.stores.urls import is_url

FORMAT = Format("zarr", (".zarr",), takes=frozenset({"columns", "cache_bytes", "missing_chunks"}), extra="zarr")

Array = npt.NDArray[Any]
MARKS = ("zarr.json", ".zarray", ".zgroup")
_SHARD_ENTRY_BYTES = 16  # in the index of a Zarr shard: offset and length of one inner chunk


def is_zarr(path: Path) -> bool:
    """Whether a directory is a Zarr array or group, of version 2 or 3."""
    return any((path / mark).is_file() for mark in MARKS)


class Place(Protocol):
    """Where Zarr arrays and groups lie."""

    @property
    def versions(self) -> Mapping[str, FileVersion | Version]:
        """Of the metadata that were read, by path or address."""

    def is_zarr(self, path: Any) -> bool:
        """Whether there is an array or a group."""

    def is_array(self, path: Any) -> bool:
        """Whether it is an array, and no group."""

    def array(self, path: Any) -> ZarrArray:
        """An open array."""

    def members(self, path: Any) -> dict[str, Any]:
        """The arrays and groups that lie in a group, by name."""


class LocalZarr:
    """A `Place` on a local disk.

    Args:
      fill: as of a `ZarrArray`.
    """

    def __init__(self, fill: bool) -> None:
        self._fill = fill
        self.versions: dict[str, FileVersion | Version] = {}

    def is_zarr(self, path: Path) -> bool:
        """Whether there is an array or a group."""
        return is_zarr(path)

    def is_array(self, path: Path) -> bool:
        """Whether it is an array, and no group."""
        if not (path / "zarr.json").is_file():
            return (path / ".zarray").is_file()
        return says_array(read_metadata(path / "zarr.json"), path / "zarr.json")

    def array(self, path: Path) -> ZarrArray:
        """An open array."""
        array = ZarrArray(path, self._fill)
        self.versions[str(array.metadata)] = array.version
        return array

    def members(self, path: Path) -> dict[str, Path]:
        """The arrays and groups that lie in a group, by name."""
        return {child.name: child for child in sorted(path.iterdir()) if child.is_dir() and is_zarr(child)}


def local_place(path: Path, options: OpenOptions) -> tuple[Place, Path]:
    """Where an array or a group lies, and its path there."""
    return LocalZarr(options.missing_chunks == "fill"), path


class Folder(NamedTuple):
    """The path or address of an array or a group."""

    name: str

    def check(self) -> None:
        """Do nothing: the versions of metadata are compared by `ZarrArray`."""


class Folders(list[Folder]):
    """Arrays or groups, in the order of their rows, as the `Files` of a source. They pickle as their paths."""

    in_store = False

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(map(Folder, paths))
        self.paths = list(paths)

    def opened(self, number: int, open_file: Callable[[Folder], Any]) -> Any:
        """What `open_file` makes of a folder."""
        return open_file(self[number])

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def __reduce__(self) -> Any:
        return Folders, (self.paths,)


@dataclasses.dataclass
class _OpenedFolder:
    """A folder when it was first opened: the versions of its metadata, and its identity once computed."""

    versions: Mapping[str, FileVersion | Version]
    identity: list[Any] | None = None


class ZarrFolders:
    """Opens Zarr folders, and refuses one that has changed when it is opened again, also in worker processes.

    A folder that is opened again must have the same metadata, and the same sampled rows.

    Args:
      place_of: (path or address, options) → where it lies, and its path there.
    """

    def __init__(self, place_of: Callable[[Any, OpenOptions], tuple[Place, Any]] = local_place) -> None:
        self._place_of = place_of
        self._opened: dict[str, _OpenedFolder] = {}

    def __call__(self, folder: Folder, options: OpenOptions) -> Grouped:
        """The chunks of an array, or of the arrays of a group as a dict, along their first axis.

        Raises:
          FileNotFoundError, ValueError, TypeError: it cannot be read, or not as rows.
          FeedError: it was opened before, and has changed since; or a store cannot be read.
        """
        path = folder.name if is_url(folder.name) else Path(folder.name)
        before = self._opened.get(str(path))
        place, at = self._place_of(path, options)
        try:
            if not place.is_zarr(at):
                raise FileNotFoundError(
                    f"{path} is no Zarr array or group: it has none of {', '.join(MARKS)}; check the path"
                )
            tree = _opened(place, at, options)
        finally:  # also if it cannot be opened: a change explains that better
            for metadata, version in before.versions.items() if before else ():
                _check(metadata, version, place.versions.get(metadata))
        arrays: list[ZarrArray] = jax.tree_util.tree_leaves(tree)

        def identity(allow_bad_rows: bool) -> list[Any]:
            for array in arrays:
                array.fetch_ahead(digests.sampled_numbers(array.shape[0]), 1, 0)
            failures: list[RowError] = []
            known = [_sampled_rows(array, failures) for array in arrays]
            self._opened[str(path)].identity = known
            if failures and not allow_bad_rows:
                raise failures[0]
            return known

        def fetch_ahead(leaf: int, groups: Sequence[int], ahead: int) -> bool:
            height = arrays[leaf].height
            return arrays[leaf].fetch_ahead([group * height for group in groups], height, ahead)

        def close() -> None:
            for array in arrays:
                array.close()

        if before is None:
            self._opened[str(path)] = _OpenedFolder(dict(place.versions))
        elif (sampled := before.identity) is not None and identity(allow_bad_rows=True) != sampled:
            raise FeedError(
                "the chunks of a Zarr array must not change while a feed reads it, and rows sampled when "
                "the feed was built differ now. Write new data to a new path, and build a new feed",
                stage="read",
                file=str(path),
            )
        return Grouped(
            jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), tree),
            [EvenLengths(array.shape[0], array.height) for array in arrays],
            lambda leaf, group: NumberColumn(arrays[leaf].chunks(group)),
            identity=identity,
            will_read=fetch_ahead if is_url(path) else None,
            close=close,
        )


def _check(path: str, version: FileVersion | Version, now: FileVersion | Version | None) -> None:
    """Refuse metadata that have changed. Those of an object that was not read again are not compared."""
    if isinstance(version, FileVersion):
        version.check(path)
    elif isinstance(now, Version):
        version.check(now, path)


def _sampled_rows(array: ZarrArray, failures: list[RowError]) -> list[Any]:
    """A digest of some rows. The errors of rows that cannot be read are appended to `failures`."""

    def row_at(row: int) -> Any:
        try:
            return array.row(row)
        except RowError as error:
            raise_of_signal_handler(error)
            failures.append(error)
            return np.empty(0, np.uint8)

    return digests.of_rows(array.dtype, array.shape, row_at)


def _opened(place: Place, path: Any, options: OpenOptions) -> Any:
    """An open array, in a dict if it is given a name; or a dict of the arrays of a group."""
    if place.is_array(path):
        return options.named(place.array(path), str(path))
    return _group(place, path, options)


def _group(place: Place, path: Any, options: OpenOptions) -> dict[str, Any]:
    """The chosen arrays of a group, open; a group in the group is a dict in the dict.

    Raises:
      ValueError: the arrays differ in length or are no rows; the error lists them, and some that fit together.
    """
    members = place.members(path)
    opened: dict[str, Any] = {}
    found: dict[str, str] = {}
    for name in options.chosen(list(members), str(path)) if members else []:
        try:
            opened[name] = _tree(place, members[name])
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    lengths = {name: {array.shape[0] for array in jax.tree.leaves(tree)} for name, tree in opened.items()}
    if not found and len(set[int]().union(*lengths.values())) == 1:
        return opened
    arrays = {name: jax.tree.leaves(tree) for name, tree in opened.items() if jax.tree.leaves(tree)}
    if not arrays and not found:
        raise ValueError(f"a Zarr group must have at least one array, {path} has none")
    found |= {name: f"{' or '.join(map(str, sorted(lengths[name])))} rows" for name in arrays}
    listed = ", ".join(f"{name} ({found[name]})" for name in sorted(found))
    if not arrays:
        raise ValueError(f"none of the arrays of {path} can be read as rows: {listed}")
    largest = max(itertools.chain(*arrays.values()), key=lambda array: math.prod(array.shape)).shape[0]
    fitting = [name for name in sorted(arrays) if lengths[name] == {largest}]
    raise ValueError(
        f"the arrays of a Zarr group must have the same number of rows, {path} has {listed}; choose those that "
        f"belong together: columns={fitting}"
    )


def _tree(place: Place, path: Any) -> Any:
    """An open array, or a dict of the arrays of a group."""
    if place.is_array(path):
        return place.array(path)
    return {name: _tree(place, member) for name, member in place.members(path).items()}


def says_array(metadata: dict[str, Any], path: object) -> bool:
    """Whether the metadata of version 3 are those of an array; else those of a group."""
    kind = metadata.get("node_type")
    if kind not in ("array", "group"):
        raise ValueError(f"{path}: node_type must be array or group, got {kind!r}; write it again")
    return bool(kind == "array")


class ZarrArray:
    """An open array. A read fails if the metadata file has changed since.

    Args:
      path: of its folder.
      fill: a missing chunk has the fill value of the metadata, instead of being an error.

    Raises:
      ValueError, TypeError: the metadata cannot be read, or do not describe rows of numbers.
    """

    def __init__(self, path: Path, fill: bool) -> None:
        self._path: object = path
        is_v3 = (path / "zarr.json").is_file()
        self.metadata = path / ("zarr.json" if is_v3 else ".zarray")
        self.version = FileVersion.of(self.metadata)  # before it is read, so that no later change is missed
        has_fill = read_metadata(self.metadata).get("fill_value") is not None
        spec = {
            "driver": "zarr3" if is_v3 else "zarr",
            "kvstore": {"driver": "file", "path": f"{path.absolute()}/"},
            "fill_missing_data_reads": fill and has_fill,
        }
        tensorstore = extras.require("tensorstore", "zarr")
        try:
            self._store = tensorstore.open(spec, open=True, read=True).result()
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as a Zarr array: {error}; write it again") from error
        self._check(self.metadata.name)

    def _check(self, metadata: str) -> None:
        """Note what the metadata say of the rows of `_store`, which lie at `_path`.

        Raises:
          ValueError, TypeError: they do not describe rows of numbers.
        """
        if self._store.rank == 0:
            raise ValueError(f"{self._path}: an array needs a first axis that counts rows, got a scalar")
        if not is_numeric(self._store.dtype.numpy_dtype):
            raise TypeError(
                f"{self._path}: an accelerator holds numbers and booleans, got dtype {self._store.dtype.name}; "
                "encode it as numbers first"
            )
        self.shape = tuple(self._store.shape)
        self.dtype = np.dtype(self._store.dtype.numpy_dtype)
        self.height = max(1, self._store.chunk_layout.read_chunk.shape[0])
        self._check_memory(metadata)

    def _check_memory(self, metadata: str) -> None:
        """Refuse sizes that TensorStore cannot allocate: it would abort the process, without an exception."""
        layout = self._store.chunk_layout
        chunk, shard = layout.read_chunk.shape, layout.write_chunk.shape  # equal without shards
        item, row = self.dtype.itemsize, math.prod(self.shape[1:])
        needs = {
            "a row of its chunks": min(self.height, self.shape[0]) * row * item,
            "one of its chunks": math.prod(chunk) * item,
            "the index of one of its shards": math.prod(shard) // max(1, math.prod(chunk)) * _SHARD_ENTRY_BYTES,
        }
        has = memory_bytes()
        for what, needed in needs.items():
            if needed > has:
                raise ValueError(
                    f"{self._path}: {what} must fit into memory, and takes {needed} bytes of the {has} there are "
                    f"(shape {self.shape}, chunks {tuple(chunk)}, {self.dtype}). Write it again in smaller chunks "
                    f"if {metadata} is not damaged"
                )

    def fetch_ahead(self, rows: Sequence[int], count: int, ahead: int) -> bool:
        """Start to fetch the chunks of the `count` rows from each of some rows on, which are read `ahead` batches
        later. False: that is too early. On a local disk, nothing is to be done."""
        return True

    def close(self) -> None:
        """Give up what is being fetched."""

    def chunks(self, group: int) -> Array:
        """The rows of a row of chunks, contiguous in memory.

        Raises:
          FeedError: the metadata file was changed or deleted.
          ValueError: a chunk is missing or damaged.
        """
        return self._read(slice(group * self.height, min((group + 1) * self.height, self.shape[0])))

    def row(self, row: int) -> Array:
        """One row. RowError if it cannot be read."""
        try:
            rows = self._read(slice(row, row + 1))
        except ValueError as error:
            raise RowError(str(error), stage="read", row=row, file=str(self._path)) from error
        return np.asarray(rows[0])

    def _read(self, rows: slice) -> Array:
        try:
            found: Array = np.ascontiguousarray(result_in_python(self._store[rows].read()))
        except ValueError as error:
            self.version.check(self.metadata)  # a deleted or replaced folder explains the error better
            if "NOT_FOUND" not in str(error):
                raise
            raise missing_error(f"this read failed with {error}") from error
        self.version.check(self.metadata)
        return found


def missing_error(found: str) -> ValueError:
    """The error for a chunk that is not there."""
    return ValueError(
        f"every chunk must be there, and {found}. Restore the chunk; or, if the writer left out chunks that hold "
        'only the fill value, pass missing_chunks="fill" to open_source (the metadata must have a fill value)'
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """The JSON object in a metadata file. ValueError if there is none."""
    return parsed_metadata(path.read_bytes(), path)


def parsed_metadata(data: bytes, path: object) -> dict[str, Any]:
    """The JSON object in the bytes of a metadata file. ValueError if there is none."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError(f"it must be a JSON object, and is a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as the metadata of Zarr: {error}; write it again") from error
    return found


def result_in_python(future: Any) -> Any:
    """The result of a TensorStore future, waited for in Python.

    A wait inside TensorStore would abort the process if the interpreter ends meanwhile ("terminate called without
    an active exception"): CPython then ends the waiting thread inside C++ code that does not allow this.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    return future.result()
