"""Zarr arrays and groups on a local disk as groups of rows, each of which is a row of chunks."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.rows import digests
from feedline._src.rows.bad_rows import raise_of_signal_handler
from feedline._src.rows.shards import EvenLengths
from feedline._src.sources.formats.file_version import FileVersion
from feedline._src.sources.formats.grouped_file import Group, GroupedFile
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.zarr_array import ZarrArray, read_metadata

MARKS = ("zarr.json", ".zarray", ".zgroup")


def is_zarr(path: Path) -> bool:
    """Whether a directory is a Zarr array or group, of version 2 or 3."""
    return any((path / mark).is_file() for mark in MARKS)


@dataclasses.dataclass
class _OpenedFolder:
    """A folder when it was first opened: the versions of its metadata files, and its identity once computed."""

    versions: dict[Path, FileVersion]
    identity: list[Any] | None = None


class ZarrFolders:
    """Opens Zarr folders, and refuses one that has changed when it is opened again, also in worker processes.

    A folder that is opened again must have the same metadata files, and the same sampled rows.
    """

    def __init__(self) -> None:
        self._opened: dict[Path, _OpenedFolder] = {}

    def __call__(self, path: Path, options: OpenOptions) -> GroupedFile:
        """The chunks of an array, or of the arrays of a group as a dict, along their first axis.

        Raises:
          FileNotFoundError, ValueError, TypeError: it cannot be read, or not as rows.
          FeedError: it was opened before, and has changed since.
        """
        before = self._opened.get(path)
        try:
            tree = _opened(path, options)
        finally:  # also if it cannot be opened: a change explains that better
            for metadata, version in before.versions.items() if before else ():
                version.check(metadata)
        arrays: list[ZarrArray] = jax.tree_util.tree_leaves(tree)

        def identity(allow_bad_rows: bool) -> list[Any]:
            failures: list[RowError] = []
            known = [sampled_rows(array, failures) for array in arrays]
            self._opened[path].identity = known
            if failures and not allow_bad_rows:
                raise failures[0]
            return known

        if before is None:
            self._opened[path] = _OpenedFolder({array.metadata: array.version for array in arrays})
        elif (sampled := before.identity) is not None and identity(allow_bad_rows=True) != sampled:
            raise FeedError(
                "the chunks of a Zarr array must not change while a feed reads it, and rows sampled when "
                "the feed was built differ now. Write new data to a new path, and build a new feed",
                stage="read",
                file=str(path),
            )
        return grouped(tree, identity)


def grouped(tree: Any, identity: Callable[[bool], list[Any]]) -> GroupedFile:
    """The rows of a tree of arrays."""
    arrays: list[ZarrArray] = jax.tree_util.tree_leaves(tree)
    return GroupedFile(
        jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), tree),
        [EvenLengths(array.shape[0], array.height) for array in arrays],
        lambda leaf, group: Group(arrays[leaf].chunks(group)),
        identity,
    )


class LocalZarr:
    """Arrays and groups on a local disk.

    Args:
      fill: as of a `ZarrArray`.
    """

    def __init__(self, fill: bool) -> None:
        self._fill = fill

    def array(self, path: Path) -> ZarrArray:
        """An open array."""
        return ZarrArray(path, self._fill)

    def is_array(self, path: Path) -> bool:
        """Whether it is an array, and no group."""
        if not (path / "zarr.json").is_file():
            return (path / ".zarray").is_file()
        return says_array(read_metadata(path / "zarr.json"), path / "zarr.json")

    def members(self, path: Path) -> dict[str, Path]:
        """The arrays and groups that lie in a group, by name."""
        return {child.name: child for child in sorted(path.iterdir()) if child.is_dir() and is_zarr(child)}


def sampled_rows(array: ZarrArray, failures: list[RowError]) -> list[Any]:
    """A digest of some rows. The errors of rows that cannot be read are appended to `failures`."""

    def row_at(row: int) -> Any:
        try:
            return array.row(row)
        except RowError as error:
            raise_of_signal_handler(error)
            failures.append(error)
            return np.empty(0, np.uint8)

    return digests.of_rows(array.dtype, array.shape, row_at)


def _opened(path: Path, options: OpenOptions) -> Any:
    """An open array, in a dict if it is given a name; or a dict of the arrays of a group."""
    if not is_zarr(path):
        raise FileNotFoundError(
            f"{path} is no Zarr array or group: it has none of {', '.join(MARKS)}; check the path"
        )
    return opened_in(LocalZarr(options.missing_chunks == "fill"), path, options)


class Place(Protocol):
    """Where Zarr arrays lie: see `LocalZarr`."""

    def array(self, path: Any) -> ZarrArray: ...
    def is_array(self, path: Any) -> bool: ...
    def members(self, path: Any) -> dict[str, Any]: ...


def opened_in(place: Place, path: Any, options: OpenOptions) -> Any:
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
