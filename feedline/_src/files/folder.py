"""Folders: many files that are read whole or in parts, by names that are known or listed; and globs in stores."""

from __future__ import annotations

import concurrent.futures
import fnmatch
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import cache_of
from feedline._src.files.client import Listed, Version, client_of
from feedline._src.files.fetcher import REQUEST_BYTES, fetcher, result_of, version_of
from feedline._src.files.file import File, FileVersion, Indices, OpenFile, absolute, changed, pread, unreadable
from feedline._src.files.remote import CachedRange, RemoteFile
from feedline._src.files.store import Store, Url, is_url
from feedline._src.rows import digests

T = TypeVar("T")
_READ_WHOLE_BYTES = 1 << 18
"""A smaller file is read whole for its digest; of a larger one sixteen parts are."""
_ZARR = ".zarr"
Name = int | str
"""The number of a listed file, or the name of any file in a folder."""


class Names(Sequence[str]):
    """Names of up to millions of files, as bytes of the file system, in little memory.

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
        """int64[k]: how many folders deep each lies."""
        slashes = np.flatnonzero(np.frombuffer(self._joined, np.uint8) == ord("/"))
        return np.diff(np.searchsorted(slashes, self._ends))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._ends.tobytes() + self._joined).hexdigest()[:32]


class Folder:
    """Files below a path, or below an address in a store. Thread-safe; it pickles, with what was listed.

    No descriptor stays open. The version of a file is noted when it is listed (in a store) or first read; a file
    that differs from that is a FeedError. In a store, what is read becomes files of the cache as it is.

    Attributes:
      name: its path or address, for errors; "" if the names are whole paths.
      place: its absolute path, or its address.
      can_list: whether it knows its `folders`; a web server does not.
      names: of the listed files, relative to it. Methods take numbers of these, or names of any files.
      versions: of files that were asked for by their names, None of those that are not there.

    Args:
      listed: size and tag of each listed file in a store, a line each.
      versions: of another process that reads the same folder; files must have these versions.
    """

    def __init__(
        self,
        address: str,
        store: Store | None = None,
        names: Names | None = None,
        listed: Names | None = None,
        versions: Mapping[str, Any] | None = None,
        place: str | None = None,
    ) -> None:
        self.in_store, self._store, self.names = is_url(address), store or Store(), names or Names()
        self._expected: Mapping[str, Any] = versions or {}
        self.versions: dict[str, Any] = {}
        self._pending: dict[Name, concurrent.futures.Future[bytes | None]] = {}
        """The requests for files. Guarded by _lock."""
        self._lock = threading.RLock()  # a request may be done before its callback is added
        if self.in_store:
            url = Url.parse(address)
            self._url, self.can_list = Url(url.base, url.key.removesuffix("/")), url.can_list
            self.name = self.place = str(self._url).removesuffix("/")
            self._listed = listed or Names()
            self._cache = cache_of(self._store)
            return
        self.name, self.place, self.can_list = address, place or absolute(address), True
        self.versions |= self._expected
        self._seen = np.zeros((len(self.names), len(FileVersion._fields)), np.int64)
        """The version of each listed file when it was first read; zeros: not read yet."""

    def __reduce__(self) -> Any:
        if self.in_store:
            return Folder, (self.name, self._store, self.names, self._listed)
        return Folder, (self.name, self._store, self.names, None, None, self.place)

    def path_of(self, file: Name) -> str:
        return f"{self.name}/{self._name(file)}" if self.name else self._name(file)

    def _name(self, file: Name) -> str:
        return self.names[file] if isinstance(file, int) else file

    def _place_of(self, file: Name) -> str:
        return os.path.join(self.place, self._name(file))

    def read(self, files: Sequence[Name]) -> list[bytes | None]:
        """The bytes of each file, all at once; None: there is no such file.

        FeedError: a listed file is missing, or one was changed; a store cannot be read; too many files are open.
        RowError: a local file cannot be read.
        """
        if not self.in_store:
            return list(map(self._read_local, files))
        found = [None if file in self._pending else self._from_cache(file) for file in files]
        absent = [file for file, data in zip(files, found, strict=True) if data is None]
        if not absent:
            return found
        fetcher().check_may_run()  # a fork would wait for ever for requests of its parent
        began, started = time.monotonic(), {file: self._begin(file) for file in absent}
        try:
            fetched = {file: result_of(future, self.path_of(file)) for file, future in started.items()}
        except BaseException:
            self.close()  # what nobody waits for is not asked for again
            raise
        finally:
            fetcher().counts.wait_s += time.monotonic() - began
        return [fetched[file] if data is None else data for file, data in zip(files, found, strict=True)]

    def will_read(self, files: Sequence[Name], ahead: int, file_bytes: int = REQUEST_BYTES) -> bool:
        """Begin to fetch files that are read `ahead` batches later, as `Files.will_read`.

        `file_bytes` is about how many bytes a file has of which that is not known.
        """
        if not self.in_store:
            return True
        versions = list(map(self._known, files))
        needed = sum(file_bytes if version is None else version.size_bytes for version in versions)
        if self._cache.is_too_early(needed, ahead):
            return False
        for file, version in zip(files, versions, strict=True):
            if version is None or not self._range(file, version).is_there():
                self._begin(file)
        return True

    def sizes(self, files: Sequence[Name]) -> list[int | None]:
        """The size of each file in bytes, all asked at once; None: there is no such file. Errors as of `read`."""
        if not self.in_store:
            return list(map(self._size_of_local, files))
        started = [fetcher().run(self._version(file)) for file in files]
        versions = [result_of(each, self.path_of(file)) for each, file in zip(started, files, strict=True)]
        return [None if version is None else version.size_bytes for version in versions]

    def check(self, files: Sequence[str]) -> None:
        """Refuse, with a FeedError, a folder in which one of these, which was read, has another version by now.

        A file that is missing is known to have never been there only if others, which must be there, still are: a
        bucket that is gone has no files either. Asks the store.
        """
        if not self.in_store:
            for file in files:
                self.versions[file].check(self._place_of(file))
            return
        started = {
            file: fetcher().run(version_of(self._url.below(file), self._store.patience_s)) for file in files
        }
        try:
            for file, future in started.items():
                self.versions[file].check(result_of(future, self.path_of(file)), self.path_of(file))
        except FeedError:
            for name, version in list(self.versions.items()):
                if version is None:  # it may be there once the store has recovered
                    del self.versions[name]
            raise

    def folders(self, below: str = "") -> list[str]:
        """The names of the folders that lie directly in it, or in the folder `below` it, sorted."""
        if self.in_store:
            return _folders(self._url.below(below) if below else self._url, self._store)
        with os.scandir(self._place_of(below)) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def digests(self, files: Sequence[int]) -> list[list[Any]]:
        """For each listed file, JSON values that identify its contents: those of `File.digest`."""
        sizes: dict[int, Any] = dict(zip(files, self.sizes(files), strict=True))
        small = [file for file, size in sizes.items() if size <= _READ_WHOLE_BYTES]
        spots = {file: digests.samples_of_file(size) for file, size in sizes.items()}
        finish = {file: self._opened(file).start_samples(spots[file]) for file in sizes.keys() - small}
        data = dict(zip(small, self.read(small), strict=True))
        samples = {
            file: [(data[file] or b"")[at : at + n] for at, n in spots[file]] if file in data else finish[file]()
            for file in files
        }
        return [digests.of_samples(sizes[file], samples[file]) for file in files]

    def _opened(self, file: int) -> File:
        version = self._known(file) if self.in_store else None
        if version is None:
            return File(self.path_of(file), place=self._place_of(file))
        return RemoteFile(self._url.below(self._name(file)), version, self._store)

    def close(self) -> None:
        """Give up what is being fetched."""
        with self._lock:
            futures = list(self._pending.values())
        for future in futures:
            future.cancel()

    # --- on local disk ---

    def _size_of_local(self, file: Name) -> int | None:
        if file in self.versions:
            self.check([str(file)])
        try:
            return os.path.getsize(self._place_of(file))
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(file, int):
                raise unreadable(error, file, self.path_of(file)) from error
            return None

    def _read_local(self, file: Name) -> bytes | None:
        path = self._place_of(file)
        try:
            opened = OpenFile(path)
            data = pread(opened.descriptor, opened.version.size_bytes, 0)
            after = FileVersion.of(opened.descriptor)
        except (OSError, MemoryError) as error:
            if isinstance(file, str) and isinstance(error, FileNotFoundError | NotADirectoryError):
                if file in self.versions:
                    self.check([file])
                return None
            raise unreadable(error, file if isinstance(file, int) else 0, path) from error
        if isinstance(file, str):
            before = self.versions.setdefault(file, opened.version)
        else:
            before = FileVersion(*self._seen[file].tolist()) if self._seen[file, -1] else opened.version
        before.compare(after, path)
        if len(data) != after.size_bytes:
            raise changed(path, f"it has {len(data)} bytes and had {after.size_bytes}")
        if isinstance(file, int):
            self._seen[file, :-1] = after[:-1]
            self._seen[file, -1] = after.modified_ns  # last: another thread may look
        return data

    # --- in a store ---

    def _known(self, file: Name) -> Version | None:
        if isinstance(file, int):
            size, tag = self._listed[file].split("\n")
            return Version(int(size), tag)
        return self.versions.get(file)

    def _range(self, file: Name, version: Version) -> CachedRange:
        url = self._url.below(self._name(file))
        return CachedRange(self._cache, url, version, 0, version.size_bytes, self._store.patience_s)

    def _from_cache(self, file: Name) -> bytes | None:
        version = self._known(file)
        if version is None:
            return None
        data = self._range(file, version).stored()
        fetcher().counts.cached += data is not None
        return data

    def _begin(self, file: Name) -> concurrent.futures.Future[bytes | None]:
        with self._lock:
            future = self._pending.get(file)
            if future is None or future.done():
                future = self._pending[file] = fetcher().run(self._fetch(file))
                future.add_done_callback(functools.partial(self._done, file))
        return future

    def _done(self, file: Name, future: concurrent.futures.Future[bytes | None]) -> None:
        with self._lock:
            if self._pending.get(file) is future:
                del self._pending[file]

    async def _fetch(self, file: Name) -> bytes | None:
        version = await self._version(file)
        if version is None:
            return None
        return await self._range(file, version).all()

    async def _version(self, file: Name) -> Version | None:
        if isinstance(file, int) or file in self.versions:
            return self._known(file)
        expected: Version | None = self._expected.get(file)
        version: Version | None = None
        try:
            version = await version_of(self._url.below(file), self._store.patience_s)
        except FileNotFoundError:
            if expected is not None:
                raise changed(self.path_of(file), "it cannot be found any more") from None
        if expected is not None and version is not None:
            expected.check(version, self.path_of(file))
        self.versions[file] = version
        return version


# --- listings ---


def listed_folder(address: str, store: Store | None = None) -> Folder:
    """A folder with the names of its files at any depth, sorted by the parts of their paths.

    Hidden files and folders are left out. So are, in a store, the empty objects that some programs write for
    folders. ValueError: a link to nothing; a web server, which lists no files.
    """
    if not is_url(address):
        return Folder(address, store, Names(list(_files_below(os.fsencode(address), b"", 0))))
    url = Url.parse(address)
    if not url.can_list:
        raise ValueError(
            f"a web server does not list its files, so a folder must lie in s3:// or gs://, got {address}; open "
            "it there, or write its files to tar or TFRecord"
        )
    key = url.key.removesuffix("/")
    prefix = f"{key}/" if key else ""
    found = {each.url.key[len(prefix) :]: each for each in listing(Url(url.base, prefix), store or Store())}
    found = {name: each for name, each in found.items() if not any(p.startswith(".") for p in name.split("/"))}
    if any("/" in name for name in found):  # then an empty object may stand for a folder, also for an empty one
        folders = {name[: name.index("/")] for name in found if "/" in name}
        folders |= {name.rpartition("/")[0] for name in found}
        found = {
            name: each
            for name, each in found.items()
            if each.version.size_bytes or ("/" in name and name not in folders)
        }
    return folder_of(
        [found[name] for name in sorted(found, key=lambda name: name.split("/"))], store, Url(url.base, key)
    )


def folder_of(
    files: Sequence[str] | Sequence[Listed], store: Store | None = None, url: Url | None = None
) -> Folder:
    """A folder of these files, in this order: local paths, or objects that a store listed (`matches`). None as
    `url`: the deepest folder that holds all of them.
    """
    paths = [file.url.key if isinstance(file, Listed) else file for file in files]
    common = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths and url is None else ""
    listed = [file for file in files if isinstance(file, Listed)]
    if url is None and not listed:
        return Folder(common, store, Names([os.fsencode(os.path.relpath(path, common or ".")) for path in paths]))
    url = url or Url(listed[0].url.base, common)
    for each in listed:
        each.version.check_strong(str(each.url))
    skipped = len(url.key) + 1 if url.key else 0
    versions = [f"{each.version.size_bytes}\n{each.version.tag}".encode() for each in listed]
    return Folder(str(url), store, Names([os.fsencode(path[skipped:]) for path in paths]), Names(versions))


def _files_below(folder: bytes, prefix: bytes, depth: int) -> Iterable[bytes]:
    """The names of the visible files in a folder and, beyond two levels, of the first file of each folder."""
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
                raise ValueError(f"{path} is a link to a file that does not exist; delete the link, or mend it")


def matches(url: str, options: Store) -> list[Listed] | None:
    """The objects, or Zarr folders, that a glob matches, sorted; None of an address that is no glob.

    FileNotFoundError: no match. ValueError: no address, or the store does not list its keys.
    """
    parsed = Url.parse(url)
    if not parsed.is_glob:
        return None
    if not parsed.can_list:
        raise ValueError(
            f"a web server does not list its files, so http:// and https:// take no globs, got {url}; write a "
            "glob over s3:// or gs://, or name each file"
        )
    pattern = parsed.key.split("/")
    above = Url(parsed.base, "/".join(pattern[:-1]))
    found: list[Listed] = []
    if parsed.key.endswith(_ZARR) and not above.is_glob:
        names = [name for name in _folders(above, options) if is_match([name], pattern[-1:])]
        found = [Listed(above.below(name), Version(0, "")) for name in names]
    if not found:
        listed = listing(Url(parsed.base, re.split(r"[*?\[]", parsed.key, maxsplit=1)[0]), options)
        found = [each for each in listed if is_match(each.url.key.split("/"), pattern)]
    if not found:
        raise FileNotFoundError(f"no object matches {url}; check the bucket and the pattern")
    return found


def is_match(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a glob matches, part by part, as in the module glob: "**" stands for any folders that are visible.

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


def listing(prefix: Url, options: Store) -> list[Listed]:
    """All objects of a bucket whose keys begin with that of `prefix`, in sorted order."""
    client = client_of(prefix.base)
    return _asked(prefix, options, lambda: client.listed(prefix.key, options.patience_s))


def _folders(prefix: Url, options: Store) -> list[str]:
    client = client_of(prefix.base)
    return _asked(prefix, options, lambda: client.folders(prefix.key, options.patience_s))


def _asked(prefix: Url, options: Store, request: Callable[[], Awaitable[T]]) -> T:
    return fetcher().run(fetcher().patiently(str(prefix), options.patience_s, None, request)).result()
