"""Folders of files that are read whole. Also listings and globs, on local disk and in stores."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import cache_of
from feedline._src.files.cached_range import CachedRange
from feedline._src.files.client import Listed, RemoteObject, client_of
from feedline._src.files.fetcher import REQUEST_BYTES, InFlight, fetcher, gathered, result_of
from feedline._src.files.file import (
    File,
    Indices,
    OpenFile,
    Version,
    absolute,
    changed,
    digests_of,
    pread,
    unreadable,
)
from feedline._src.files.remote import RemoteFile
from feedline._src.files.store import SCHEMES, Store, Url, is_url

T = TypeVar("T")
_ZARR = ".zarr"
Name = int | str
"""The number of a listed file, or the name of any file in a folder."""


class Names(Sequence[str]):
    """Names of up to millions of files, in little memory: as bytes, encoded like the file system's names.

    Example:
      >>> names = Names([b"a.jpg", b"b.jpg"])
      >>> len(names), names[1], names.digest == Names([b"a.jpgb.jpg"]).digest
      (2, 'b.jpg', False)
    """

    def __init__(self, names: Sequence[bytes] = ()) -> None:
        self._joined = b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return os.fsdecode(self._joined[self._ends[number] : self._ends[number + 1]])

    @property
    def depths(self) -> Indices:
        """int64[k]: the number of folders in each name."""
        slashes = np.flatnonzero(np.frombuffer(self._joined, np.uint8) == ord("/"))
        return np.diff(np.searchsorted(slashes, self._ends))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._ends.tobytes() + self._joined).hexdigest()[:32]


class Folder:
    """Files below a path, or below an address in a store (`RemoteFolder`). Thread-safe and picklable.

    No descriptor stays open. The version of a file is recorded when the file is listed (in a store) or first read;
    if a later read finds another version, it raises a FeedError.

    Attributes:
      name: its path or address, for errors; "" if the names are whole paths.
      place: its absolute path, or its address.
      can_list: whether `folders` works; a web server does not list folders.
      names: the names of listed files, relative to the folder. Methods accept an index of this list, or any name.
      versions: the versions of files that were read by their names; None for a name without a file.
    """

    in_store = False
    can_list = True

    def __init__(self, name: str, names: Names, versions: Mapping[str, Any], place: str | None = None) -> None:
        self.name, self.place, self.names = name, place or absolute(name), names
        self.versions: dict[str, Any] = dict(versions)
        self._seen = np.zeros(len(names), np.int64)
        """A hash of the version that each listed file had when it was first read; 0: not read yet."""

    def __reduce__(self) -> Any:
        return Folder, (self.name, self.names, {}, self.place)

    def path_of(self, file: Name) -> str:
        return f"{self.name}/{self._name(file)}" if self.name else self._name(file)

    def _name(self, file: Name) -> str:
        return self.names[file] if isinstance(file, int) else file

    def _place_of(self, file: Name) -> str:
        return os.path.join(self.place, self._name(file))

    def read(self, files: Sequence[Name]) -> list[bytes | None]:
        """Read each file whole; None: there is no such file. In a store, all files are requested at once.

        FeedError: a listed file is missing; a file was changed; a store cannot be read; too many files are open.
        RowError: a local file cannot be read.
        """
        return list(map(self._read, files))

    def _read(self, file: Name) -> bytes | None:
        path = self._place_of(file)
        try:
            opened = OpenFile(path)
            data = pread(opened.descriptor, opened.version.size_bytes, 0)
        except (OSError, MemoryError) as error:
            is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            if is_missing and isinstance(file, str) and file not in self.versions:
                return None
            raise unreadable(error, file if isinstance(file, int) else 0, path) from error
        opened.check()
        if len(data) != opened.version.size_bytes:
            raise changed(path, f"its size changed from {opened.version.size_bytes} to {len(data)} bytes")
        if isinstance(file, str):
            self.versions.setdefault(file, opened.version).compare(opened.version, path)
        else:
            version, seen = hash(opened.version) or 1, self._seen[file]
            if seen and seen != version:
                raise changed(path, "it was replaced or written to")
            self._seen[file] = version
        return data

    def will_read(self, files: Sequence[Name], ahead: int, file_bytes: int = REQUEST_BYTES) -> bool:
        """Start fetching files for the batch that is `ahead` batches after the current one. See `Files.will_read`.

        `file_bytes` is the assumed size of a file whose size is not known.
        """
        return True

    def check(self, files: Sequence[str]) -> None:
        """Raise a FeedError if any of these files has another version than when it was read. Asks the store.

        A file also seems missing if its bucket is gone. So if one is missing, also check a file that must exist.
        """
        for file in files:
            self.versions[file].check(self._place_of(file))

    def folders(self, below: str = "") -> list[str]:
        """The names of the folders directly in this folder, or directly in its subfolder `below`, sorted."""
        with os.scandir(self._place_of(below)) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def digests(self, files: Sequence[int]) -> list[list[Any]]:
        """Return the digests of listed files. See `digests_of`."""
        return digests_of(list(map(self._file, files)))

    def _file(self, file: int) -> File:
        return File(self.path_of(file), place=self._place_of(file))

    def close(self) -> None:
        """Cancel requests in flight."""


class RemoteFolder(Folder):
    """A `Folder` in a store. Files that are read are stored in the cache.

    Args:
      listed: for each listed file two lines, its size and its `Version.stamp`.
      expected: the versions that another process found; files that are read by name must have them.
    """

    in_store = True

    def __init__(self, url: Url, store: Store, names: Names, listed: Names, expected: Mapping[str, Any]) -> None:
        self._url, self._store, self._listed, self._expected = url, store, listed, expected
        self.name = self.place = str(url).removesuffix("/")
        self.can_list, self.names, self.versions = url.can_list, names, {}
        self._cache, self._client = cache_of(store), client_of(url.base, store.patience_s)
        self._requests: InFlight[Name, bytes | None] = InFlight()

    def __reduce__(self) -> Any:
        return RemoteFolder, (self._url, self._store, self.names, self._listed, {})

    def read(self, files: Sequence[Name]) -> list[bytes | None]:
        ranges = {file: self._range(file) for file in files}
        found = {file: None if stored is None else stored.read_all() for file, stored in ranges.items()}
        requests = self._begin([file for file, data in found.items() if data is None])
        found |= {file: result_of(request, self.path_of(file)) for file, request in requests.items()}
        return [found[file] for file in files]

    def will_read(self, files: Sequence[Name], ahead: int, file_bytes: int = REQUEST_BYTES) -> bool:
        ranges = {file: self._range(file) for file in files}
        needed = sum(file_bytes if stored is None else stored.size for stored in ranges.values())
        if self._cache.is_too_early(needed, ahead):
            return False
        self._begin([file for file, stored in ranges.items() if not (stored and os.path.exists(stored.path))])
        return True

    def check(self, files: Sequence[str]) -> None:
        try:
            versions = result_of(fetcher().run(gathered(map(self._present_version, files))), self.name)
            for file, version in zip(files, versions, strict=True):
                self.versions[file].compare(version, self.path_of(file))
        except FeedError:
            # forget which files are missing: they may be there once the store has recovered
            self.versions = {name: version for name, version in self.versions.items() if version is not None}
            raise

    def folders(self, below: str = "") -> list[str]:
        url = self._url.below(below) if below else self._url
        return fetcher().run(self._client.folders(url.key)).result()

    def close(self) -> None:
        self._requests.cancel()

    def _file(self, file: int) -> File:
        return RemoteFile(self._url.below(self._name(file)), self._listed_version(file), self._store)

    def _listed_version(self, file: int) -> Version:
        size, stamp = self._listed[file].split("\n")
        return Version(int(size), stamp)

    def _range(self, file: Name) -> CachedRange | None:
        """The `CachedRange` of a file; None while its version is not known, or if the file does not exist."""
        version = self._listed_version(file) if isinstance(file, int) else self.versions.get(file)
        if version is None:
            return None
        stored = RemoteObject(self._url.below(self._name(file)), version, self._store.patience_s)
        return CachedRange(self._cache, stored, 0, version.size_bytes)

    # --- requests ---

    def _begin(self, files: Sequence[Name]) -> dict[Name, Any]:
        return self._requests.start(files, lambda new: [([file], self._fetch(file)) for file in new])

    async def _fetch(self, file: Name) -> bytes | None:
        if isinstance(file, str) and file not in self.versions:
            version = await self._present_version(file)
            if expected := self._expected.get(file):
                expected.compare(version, self.path_of(file))
            self.versions[file] = version
        stored = self._range(file)
        return None if stored is None else await stored.all()

    async def _present_version(self, file: str) -> Version | None:
        try:
            return await self._client.version(self._url.below(file).key)
        except FileNotFoundError:
            return None


# --- listings ---


def folder_at(address: str, store: Store | None = None, versions: Mapping[str, Any] | None = None) -> Folder:
    """Open a folder whose files are read by name.

    Args:
      versions: the versions that another process found, which the files must have.
    """
    if not is_url(address):
        return Folder(address, Names(), versions or {})
    base, key = Url.parse(address)
    url = Url(base, key.removesuffix("/"))
    return RemoteFolder(url, store or Store(), Names(), Names(), versions or {})


def listed_folder(address: str, store: Store | None = None) -> Folder:
    """List the files of a folder at any depth (see `_files_below`), sorted by the parts of their paths.

    Hidden files and folders are left out. In a store, so are the empty objects that some programs write to
    represent folders. ValueError: a link to nothing, or a web server, which does not list files.
    """
    if not is_url(address):
        return Folder(address, Names(list(_files_below(os.fsencode(address), b"", 0))), {})
    url = Url.parse(address)
    _check_can_list(url)
    key = url.key.removesuffix("/")
    prefix = f"{key}/" if key else ""
    found = {each.url.key[len(prefix) :]: each for each in listing(Url(url.base, prefix), store or Store())}
    names = [name for name in found if not any(part.startswith(".") for part in name.split("/"))]
    parents = {name.rpartition("/")[0] for name in names}
    if any(parents):  # there are folders, so an empty object may represent a folder, even an empty one
        names = [name for name in names if found[name].version.size_bytes or ("/" in name and name not in parents)]
    files = [found[name] for name in sorted(names, key=lambda name: name.split("/"))]
    return _of_listed(files, Url(url.base, key), store)


def folder_of(files: Sequence[str] | Sequence[Listed], store: Store | None = None) -> Folder:
    """Return the deepest folder that contains these local files or listed objects. Keeps their order."""
    keys = [file.url.key if isinstance(file, Listed) else file for file in files]
    common = os.path.commonpath([os.path.dirname(key) for key in keys]) if keys else ""
    listed = [file for file in files if isinstance(file, Listed)]
    if listed:
        return _of_listed(listed, Url(listed[0].url.base, common), store)
    return Folder(common, Names([os.fsencode(os.path.relpath(key, common or ".")) for key in keys]), {})


def _of_listed(files: Sequence[Listed], url: Url, store: Store | None) -> Folder:
    for each in files:
        each.version.check_strong(str(each.url))
    skipped = len(url.key) + 1 if url.key else 0
    names = Names([os.fsencode(each.url.key[skipped:]) for each in files])
    versions = Names([f"{each.version.size_bytes}\n{each.version.stamp}".encode() for each in files])
    return RemoteFolder(url, store or Store(), names, versions, {})


def _files_below(folder: bytes, prefix: bytes, depth: int) -> Iterable[bytes]:
    """Yield visible files, but only one of each folder more than two levels down, which `open_folder` refuses."""
    with os.scandir(os.path.join(folder, prefix)) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = prefix + entry.name
            if entry.name.startswith(b"."):
                continue
            if entry.is_dir():
                inner = _files_below(folder, name + b"/", depth + 1)
                yield from inner if depth < 2 else [each for each, _ in zip(inner, (0,), strict=False)]
            elif entry.is_file():
                yield name
            elif entry.is_symlink():
                path = os.fsdecode(entry.path)
                raise ValueError(f"{path} is a link to a file that does not exist; delete the link, or repair it")


def matches(url: str, options: Store) -> list[Listed] | None:
    """The objects, or Zarr folders, that a glob matches, sorted. None if the address is not a glob.

    FileNotFoundError: no match. ValueError: not a valid address, or the store does not list its keys.
    """
    parsed = Url.parse(url)
    if not parsed.is_glob:
        return None
    _check_can_list(parsed)
    pattern = parsed.key.split("/")
    above = Url(parsed.base, "/".join(pattern[:-1]))
    found: list[Listed] = []
    if parsed.key.endswith(_ZARR) and not above.is_glob:
        folders = folder_at(str(above).removesuffix("/"), options).folders()
        names = [name for name in folders if is_match([name], pattern[-1:])]
        found = [Listed(above.below(name), Version(0, "")) for name in names]
    if not found:
        listed = listing(Url(parsed.base, re.split(r"[*?\[]", parsed.key, maxsplit=1)[0]), options)
        found = [each for each in listed if is_match(each.url.key.split("/"), pattern)]
    if not found:
        raise FileNotFoundError(f"no object matches {url}; check the bucket and the pattern")
    return found


def local_matches(name: str) -> list[str]:
    """Return the local files that match a path or a glob."""
    if not name:
        raise ValueError("a path must name a file or a folder, got an empty one; the working directory is '.'")
    scheme, separator, _ = name.partition("://")
    if separator and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        stores = ", ".join(f"{each}://" for each in SCHEMES)
        raise ValueError(f"stores are read by addresses with {stores}, got {name}; give a local file by its path")
    if not glob.has_magic(name) or Path(name).exists():
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        raise FileNotFoundError(f"no file matches {name}; check the folder and the pattern")
    return found


def is_match(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a glob matches a path, part by part, as in the module glob: "**" matches any visible folders.

    Example:
      >>> is_match(["a", "b", "x.npy"], ["**", "*.npy"]), is_match([".x.npy"], ["*.npy"])
      (True, False)
    """
    if not parts or not pattern:
        return not parts and not pattern
    is_visible = not parts[0].startswith(".")
    if pattern[0] == "**" and len(pattern) > 1:
        return is_match(parts, pattern[1:]) or (is_visible and is_match(parts[1:], pattern))
    shown = is_visible or pattern[0].startswith(".")
    return shown and fnmatch.fnmatchcase(parts[0], pattern[0]) and is_match(parts[1:], pattern[1:])


def _check_can_list(url: Url) -> None:
    if not url.can_list:
        raise ValueError(
            "a web server does not list its files, so folders and globs must be in s3://, gs:// or az://, got "
            f"{url}; name each file, or write the files of a folder to tar or TFRecord"
        )


def listing(prefix: Url, options: Store) -> list[Listed]:
    """All objects of a bucket whose keys begin with the key of `prefix`, sorted."""
    client = client_of(prefix.base, options.patience_s)
    return fetcher().run(client.listed(prefix.key)).result()
