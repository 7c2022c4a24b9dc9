"""Files in stores as records: all files of a folder or of a glob, of which a listing gives names and versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from feedline._src.rows import digests
from feedline._src.rows.shards import Indices
from feedline._src.sources.encoded.folder import FileNames, FolderSource, deeper_error, empty_error, mixed_error
from feedline._src.stores.client import Listed, Version
from feedline._src.stores.many_objects import ManyObjects, Part, whole
from feedline._src.stores.opening import listing
from feedline._src.stores.options import Store
from feedline._src.stores.origin import Origin
from feedline._src.stores.urls import Url

_READ_WHOLE_BYTES = 1 << 18
"""For a digest: a smaller file is one request, of a larger one sixteen parts are."""


class _Place(NamedTuple):
    """Where the files lie, as little memory: the bucket, the prefix of all keys, and by row sizes, and tags with
    nonces, a line each."""

    base: str
    prefix: str
    sizes: Indices
    tags: FileNames

    def part(self, name: str, row: int) -> Part:
        url = Url(self.base, f"{self.prefix}{name}")
        return whole(url, Version(int(self.sizes[row]), *self.tags[row].split("\n")))


class RemoteFolder(FolderSource):
    """A `FolderSource` over objects in a store, each of which is one request and one file of the cache.

    An object that was replaced or deleted since it was listed is a `FeedError`.

    Args:
      place: where the objects lie, and their versions.
      names, classes, class_ends: as of a `FolderSource`.
      options: cache and patience.
      origin: as of `ManyObjects`.
    """

    def __init__(
        self,
        place: _Place,
        names: FileNames,
        classes: Sequence[str] | None,
        class_ends: Sequence[int],
        options: Store,
        origin: Origin | None = None,
    ) -> None:
        super().__init__(f"{place.base}/{place.prefix}".removesuffix("/"), names, classes, class_ends)
        self._place = place
        self._options = options
        self._objects = ManyObjects(options, origin)

    @property
    def will_read(self) -> Callable[[Indices, int], bool]:
        """As of a `ToldSource`."""
        return self._fetch_ahead

    def file_of(self, row: int) -> str:
        """The address of the row's object."""
        return str(self._part(row).url)

    def close(self) -> None:
        """Give up what is being fetched."""
        self._objects.close()

    def _part(self, row: int) -> Part:
        return self._place.part(self._names[row], row)

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        return self._objects.fetch_ahead([self._part(row) for row in rows.tolist()], ahead)

    def _read_all(self, rows: Sequence[int]) -> list[bytes]:
        return self._objects.read([self._part(row) for row in rows])

    def _digests(self, rows: Sequence[int]) -> list[list[Any]]:
        parts = [self._part(row) for row in rows]
        of_file = [_sampled(part) for part in parts]
        data = self._objects.read([each for some in of_file for each in some])
        found, at = [], 0
        for part, some in zip(parts, of_file, strict=True):
            given = data[at : at + len(some)]
            at += len(some)
            if some == [part]:
                spots = digests.samples_of_file(part.stop)
                given = [given[0][start : start + length] for start, length in spots]
            found.append(digests.of_samples(part.stop, given))
        return found

    def __reduce__(self) -> Any:
        given = self._place, self._names, self.classes, self._class_ends, self._options, self._objects.origin
        return RemoteFolder, given


def _sampled(part: Part) -> list[Part]:
    """What is fetched of an object for its digest."""
    if part.stop <= _READ_WHOLE_BYTES:
        return [part]
    return [part._replace(start=at, stop=at + length) for at, length in digests.samples_of_file(part.stop)]


def open_listed_files(listed: Sequence[Listed], options: Store) -> RemoteFolder:
    """These objects, in this order, without labels."""
    keys = [each.url.key for each in listed]
    common = os.path.commonpath([os.path.dirname(key) for key in keys])
    return _opened(listed, f"{common}/" if common else "", None, [], options)


def open_listed_folder(address: str, options: Store) -> RemoteFolder:
    """As `open_folder`, of all objects whose keys begin with that of a folder.

    Raises:
      ValueError: the store does not list its keys; no files, or files at several depths.
      FeedError: the store cannot be read.
    """
    url = Url.parse(address)
    if not url.can_list:
        raise ValueError(
            f"a web server does not list its files, so a folder must lie in s3:// or gs://, got {address}; open "
            "it there, or write its files to tar or TFRecord"
        )
    folder = Url(url.base, url.key.removesuffix("/"))
    prefix = f"{folder.key}/" if folder.key else ""
    found: list[tuple[bytes, ...]] = []
    by_name: dict[tuple[bytes, ...], Listed] = {}
    for each in listing(Url(url.base, prefix), options):
        name = tuple(os.fsencode(part) for part in each.url.key[len(prefix) :].split("/"))
        if not any(part.startswith(b".") for part in name):
            found.append(name)
            by_name[name] = each
    folders = {name[:1] for name in found if len(name) > 1}
    if folders:  # some programs write an empty object for each folder, also for one without files
        folders |= {name for name in found if len(name) == 1 and not by_name[name].version.size_bytes}
    names = sorted(name for name in found if name not in folders or by_name[name].version.size_bytes)
    files = [name for name in names if len(name) == 1]
    if not names:
        raise empty_error(str(folder))
    if files and len(files) < len(names):
        raise mixed_error(str(folder), files[0][0], min(folders)[0])
    deep = next((name for name in names if len(name) > 2), None)
    if deep is not None:
        raise deeper_error(str(folder), deep[0], deep[1])
    listed = [by_name[name] for name in names]
    if files:
        return _opened(listed, prefix, None, [], options)
    classes = sorted(folders)
    first = np.array([name[0] for name in names], object)
    ends = np.searchsorted(first, [name[0] for name in classes], side="right").tolist()
    return _opened(listed, prefix, [os.fsdecode(name[0]) for name in classes], ends, options)


def _opened(
    listed: Sequence[Listed], prefix: str, classes: list[str] | None, ends: list[int], options: Store
) -> RemoteFolder:
    sizes = np.array([each.version.size_bytes for each in listed], np.int64)
    tags = FileNames([f"{each.version.tag}\n{each.version.nonce}".encode() for each in listed])
    names = FileNames([os.fsencode(each.url.key[len(prefix) :]) for each in listed])
    return RemoteFolder(_Place(listed[0].url.base, prefix, sizes, tags), names, classes, ends, options)
