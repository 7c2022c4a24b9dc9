"""Zarr arrays and groups in stores as groups of rows, each of which is a row of chunks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax

from feedline._src.errors import FeedError, RowError
from feedline._src.rows import digests
from feedline._src.sources.formats.grouped_file import GroupedFile
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.zarr import MARKS, grouped, opened_in, sampled_rows, says_array
from feedline._src.sources.formats.zarr_array import parsed_metadata
from feedline._src.sources.remote.zarr_array import RemoteZarrArray
from feedline._src.stores.client import Version
from feedline._src.stores.many_objects import ManyObjects, whole
from feedline._src.stores.opening import folders
from feedline._src.stores.options import Store
from feedline._src.stores.urls import Url

_CONSOLIDATED = ".zmetadata"


def is_remote_zarr(address: str, options: Store) -> bool:
    """Whether an array or a group lies at an address. FeedError: the store cannot be read."""
    url = Url.parse(address)
    return any(ManyObjects(options).versions([_folder(url).below(mark) for mark in MARKS]))


def _folder(url: Url) -> Url:
    return Url(url.base, url.key.removesuffix("/"))


class _RemoteZarr:
    """Arrays and groups in a store, as `LocalZarr`.

    Args:
      fill: as of a `RemoteZarrArray`.
      options: cache and patience.

    Attributes:
      versions: of the metadata that were read.
    """

    def __init__(self, fill: bool, options: Store) -> None:
        self._fill, self._options = fill, options
        self._objects = ManyObjects(options)
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


@dataclasses.dataclass
class _Opened:
    """A folder when it was first opened: the versions of its metadata, and its identity once computed."""

    versions: dict[str, Version]
    identity: list[Any] | None = None


class ZarrObjects:
    """Opens Zarr folders in stores, and refuses one that has changed when it is opened again, as `ZarrFolders`."""

    def __init__(self) -> None:
        self._opened: dict[str, _Opened] = {}
        self.arrays: dict[str, list[RemoteZarrArray]] = {}

    def __call__(self, address: str, options: OpenOptions) -> GroupedFile:
        """The chunks of an array, or of the arrays of a group as a dict, along their first axis.

        Raises:
          FileNotFoundError, ValueError, TypeError: it cannot be read, or not as rows.
          FeedError: it was opened before, and has changed since; or the store cannot be read.
        """
        before = self._opened.get(address)
        place = _RemoteZarr(options.missing_chunks == "fill", options.store or Store())
        url = _folder(Url.parse(address))
        try:
            if not place.is_zarr(url):
                raise FileNotFoundError(
                    f"{url} is no Zarr array or group: it has none of {', '.join(MARKS)}; check the address"
                )
            tree = opened_in(place, url, options)
        finally:  # also if it cannot be opened: a change explains that better
            for path, version in before.versions.items() if before else ():
                if path in place.versions:
                    version.check(place.versions[path], path)
        arrays: list[RemoteZarrArray] = jax.tree_util.tree_leaves(tree)
        self.arrays[address] = arrays

        def identity(allow_bad_rows: bool) -> list[Any]:
            for array in arrays:
                array.fetch_ahead([slice(row, row + 1) for row in digests.sampled_numbers(array.shape[0])], 0)
            failures: list[RowError] = []
            known = [sampled_rows(array, failures) for array in arrays]
            self._opened[address].identity = known
            if failures and not allow_bad_rows:
                raise failures[0]
            return known

        if before is None:
            self._opened[address] = _Opened(place.versions)
        elif (sampled := before.identity) is not None and identity(allow_bad_rows=True) != sampled:
            raise FeedError(
                "the chunks of a Zarr array must not change while a feed reads it, and rows sampled when "
                "the feed was built differ now. Write new data to a new key, and build a new feed",
                stage="read",
                file=address,
            )
        return grouped(tree, identity)

    def __getstate__(self) -> Any:
        return self._opened

    def __setstate__(self, state: Any) -> None:
        self._opened, self.arrays = state, {}
