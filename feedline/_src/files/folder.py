"""Folders: many files that are read whole or in parts, of which nothing is kept but names and versions."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import functools
import hashlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import cache_of, name_of
from feedline._src.files.client import Listed, Version, client_of
from feedline._src.files.fetcher import REQUEST_BYTES, Origin, fetcher, result_of
from feedline._src.files.file import FileVersion, Indices, absolute, changed, pread, unreadable
from feedline._src.files.remote import cached
from feedline._src.files.store import Store, Url, is_url
from feedline._src.rows import digests

T = TypeVar("T")
_FOLDER_SUFFIX = ".zarr"
_READ_WHOLE_BYTES = 1 << 18
"""A smaller file is read whole for its digest; of a larger one sixteen parts are."""


class Names(Sequence[str]):
    """Names of up to millions of files in little memory.

    Args:
      names: relative to a folder, as bytes of the file system.

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
        """Of all names and their order."""
        return hashlib.sha256(self._ends.tobytes() + self._joined).hexdigest()[:32]


class Part(NamedTuple):
    """Bytes of a file in a folder.

    Attributes:
      file: the number of a listed file, or the name of any file in the folder.
      start: the first byte; negative: counted from the end.
      stop: None: the end.
    """

    file: int | str
    start: int = 0
    stop: int | None = None


class Folder(abc.ABC):
    """Files below a path or address. Thread-safe; it pickles, with the versions of its listed files.

    No descriptor stays open. The version of a file is noted when it is listed or first read; a file that differs
    from that is a FeedError.

    Attributes:
      name: its path or address, for errors.
      place: its absolute path, or its address.
      names: of the listed files, relative to it; empty unless it was made by `listed_folder` or `folder_of`.
      versions: of files that were asked for by their names, None of those that are not there.
    """

    name: str
    place: str
    names: Names
    versions: Mapping[str, FileVersion | Version | None]

    def path_of(self, file: int | str) -> str:
        """The path or address of a file."""
        name = self.names[file] if isinstance(file, int) else file
        return f"{self.name}/{name}" if self.name else name

    @abc.abstractmethod
    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """The bytes of each part, all at once: fewer where the file ends; None: there is no such file.

        A listed file that is missing is an error, and so is one of the `versions` of `open_folder`.

        Raises:
          FeedError: a file was changed or deleted; its store cannot be read; too many files are open.
          RowError: a local file cannot be read.
        """

    @abc.abstractmethod
    def cached(self, part: Part) -> bytes | None:
        """The bytes of a part without any request; None unless they are on local disk, of a known version."""

    @abc.abstractmethod
    def will_read(self, parts: Sequence[Part], ahead: int, part_bytes: int | None = None) -> bool:
        """Begin to fetch parts that are read `ahead` batches later.

        Args:
          part_bytes: about how many bytes a part has, if the sizes of some are not known: files without a number.

        Returns:
          False if that is too early; nothing was begun, and the caller asks again later. See `Files.will_read`.
        """

    @abc.abstractmethod
    def sizes(self, files: Sequence[int | str]) -> list[int | None]:
        """The size of each file in bytes, all asked at once; None: there is no such file. Errors as of `read`."""

    @abc.abstractmethod
    def check(self, files: Sequence[str]) -> None:
        """Refuse, with a FeedError, a folder in which one of these, which was read, has another version by now.

        A file that is missing is known to have never been there only if others, which must be there, still are: a
        bucket that is gone has no files either.
        """

    @property
    def can_list(self) -> bool:
        """Whether it knows its `folders`; a web server does not."""
        return True

    @abc.abstractmethod
    def folders(self, below: str = "") -> list[str]:
        """The names of the folders that lie directly in it, or in the folder `below` it, sorted."""

    @abc.abstractmethod
    def select(self, numbers: Indices) -> Folder:
        """A folder whose listed files are these, in this order."""

    def digests(self, files: Sequence[int]) -> list[list[Any]]:
        """For each listed file, JSON values that identify its contents: those of `File.digest`."""
        asked: list[tuple[int, list[tuple[int, int]], list[Part]]] = []
        for file, size in zip(files, self.sizes(files), strict=True):
            assert size is not None  # a missing listed file is an error
            spots = digests.samples_of_file(size)
            whole = size <= _READ_WHOLE_BYTES
            asked.append((size, spots, [Part(file)] if whole else [Part(file, at, at + n) for at, n in spots]))
        data = iter(self.read([part for *_, parts in asked for part in parts]))
        found = []
        for size, spots, parts in asked:
            given = [next(data) or b"" for _ in parts]
            if len(parts) == 1:
                given = [given[0][at : at + n] for at, n in spots]
            found.append(digests.of_samples(size, given))
        return found

    @property
    def in_store(self) -> bool:
        """Whether its files are objects in a store, so that it pays to say what will be read."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what is being fetched."""


class LocalFolder(Folder):
    """A `Folder` on local disk.

    Args:
      name: its path; "" if the names are whole paths.
      names: of listed files.
      versions: that files must have which are read by their names.
      place: its absolute path; None: where `name` leads now.
    """

    def __init__(
        self,
        name: str,
        names: Names | None = None,
        versions: Mapping[str, FileVersion] | None = None,
        place: str | None = None,
    ) -> None:
        self.name, self.names, self.place = name, names or Names(), place or absolute(name)
        self.versions: dict[str, FileVersion] = dict(versions or {})
        self._seen_bytes = np.full(len(self.names), -1, np.int64)
        """The size of each listed file when it was first read; -1: not read yet. Written after _seen_ns."""
        self._seen_ns = np.zeros(len(self.names), np.int64)
        """Its time of modification then."""

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """See `Folder.read`."""
        return [self._read(part) for part in parts]

    def cached(self, part: Part) -> bytes | None:
        """See `Folder.cached`."""
        return self._read(part)

    def will_read(self, parts: Sequence[Part], ahead: int, part_bytes: int | None = None) -> bool:
        """Do nothing."""
        return True

    def sizes(self, files: Sequence[int | str]) -> list[int | None]:
        """See `Folder.sizes`."""

        def size(file: int | str) -> int | None:
            if file in self.versions:
                self.check([str(file)])
            try:
                return os.path.getsize(self._place_of(file))
            except (FileNotFoundError, NotADirectoryError) as error:
                if isinstance(file, int):
                    raise unreadable(error, file, self.path_of(file)) from error
                return None

        return [size(file) for file in files]

    def check(self, files: Sequence[str]) -> None:
        """See `Folder.check`."""
        for file in files:
            self.versions[file].check(self._place_of(file))

    def folders(self, below: str = "") -> list[str]:
        """See `Folder.folders`."""
        with os.scandir(self._place_of(below)) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def select(self, numbers: Indices) -> LocalFolder:
        """See `Folder.select`."""
        names = Names([os.fsencode(self.names[number]) for number in numbers.tolist()])
        return LocalFolder(self.name, names, place=self.place)

    def close(self) -> None:
        """Do nothing."""

    def _place_of(self, file: int | str) -> str:
        """The absolute path of a file."""
        return os.path.join(self.place, self.names[file] if isinstance(file, int) else file)

    def _read(self, part: Part) -> bytes | None:
        listed = part.file if isinstance(part.file, int) else None
        path = self._place_of(part.file)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                before = FileVersion.of(descriptor)
                start, stop, _ = slice(part.start, part.stop).indices(before.size_bytes)
                data = pread(descriptor, max(0, stop - start), start)
                after = FileVersion.of(descriptor)
            finally:
                os.close(descriptor)
        except (OSError, MemoryError) as error:
            if listed is None and isinstance(error, FileNotFoundError | NotADirectoryError):
                if part.file in self.versions:
                    self.check([str(part.file)])
                return None
            raise unreadable(error, listed or 0, path) from error
        if listed is not None and self._seen_bytes[listed] >= 0:
            seen = int(self._seen_bytes[listed]), int(self._seen_ns[listed])
            before = before._replace(size_bytes=seen[0], modified_ns=seen[1])
        if listed is None:
            before = self.versions.setdefault(str(part.file), before)
        before.compare(after, path)
        if len(data) != max(0, stop - start):
            raise changed(path, f"it has {start + len(data)} bytes and had {after.size_bytes}")
        if listed is not None:
            self._seen_ns[listed] = after.modified_ns
            self._seen_bytes[listed] = after.size_bytes
        return data

    def __reduce__(self) -> Any:
        return LocalFolder, (self.name, self.names, None, self.place)


class _Versions(NamedTuple):
    """Of listed objects, in little memory: by number sizes, and tags with nonces, a line each."""

    sizes: Indices
    tags: Names

    def of(self, number: int) -> Version:
        return Version(int(self.sizes[number]), *self.tags[number].split("\n"))


class StoreFolder(Folder):
    """A `Folder` in a store. What is read becomes files of the cache as it is, in pieces of up to 4 MiB.

    Args:
      url: its address.
      options: cache and patience.
      names, listed: of listed files.
      versions: that objects must have which are read by their names.
      origin: that of another process that reads the same folder.
    """

    def __init__(
        self,
        url: Url,
        options: Store,
        names: Names | None = None,
        listed: _Versions | None = None,
        versions: Mapping[str, Version] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._url, self._options = url, options
        self.name = self.place = str(url).removesuffix("/")
        self.names = names or Names()
        self._listed = listed or _Versions(np.zeros(0, np.int64), Names())
        self._cache = cache_of(options)
        self._origin = origin or Origin(options.patience_s)
        self._expected = versions or {}
        self.versions: dict[str, Version | None] = {}
        self._asking = Shared[Version | None]()
        self._getting = Shared[bytes]()
        self._ahead: dict[Part, concurrent.futures.Future[Any]] = {}
        """Parts that are being fetched ahead."""

    @property
    def in_store(self) -> bool:
        """True."""
        return True

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """See `Folder.read`."""
        found: list[Any] = [None if part in self._ahead else self.cached(part) for part in parts]
        started = {}
        began = time.monotonic()
        try:
            for part in dict.fromkeys(part for part, data in zip(parts, found, strict=True) if data is None):
                started[part] = fetcher().run(self._bytes_of(part))
            fetched = {part: result_of(future, self.path_of(part.file)) for part, future in started.items()}
        finally:
            for future in started.values():
                future.cancel()  # after an error, nobody waits for the others
            fetcher().counts.wait_s += time.monotonic() - began if started else 0
        return [fetched[part] if data is None else data for part, data in zip(parts, found, strict=True)]

    def cached(self, part: Part) -> bytes | None:
        """See `Folder.cached`."""
        version = self._known(part.file)
        if version is None:
            return None
        pieces = [
            self._cache.get(name_of(self.path_of(part.file), version.cache_tag, start, stop), stop - start)
            for start, stop in _pieces(part, version.size_bytes)
        ]
        fetcher().counts.cached += sum(piece is not None for piece in pieces)
        return None if any(piece is None for piece in pieces) else b"".join(piece or b"" for piece in pieces)

    def will_read(self, parts: Sequence[Part], ahead: int, part_bytes: int | None = None) -> bool:
        """See `Folder.will_read`."""
        sizes = [self._bytes_in(part, part_bytes) for part in parts]
        if self._cache.is_too_early(sum(sizes), ahead):
            return False
        for part in parts:
            if part not in self._ahead and not self._is_cached(part):
                future = self._ahead[part] = fetcher().run(self._bytes_of(part))
                future.add_done_callback(functools.partial(self._fetched, part))
        return True

    def _fetched(self, part: Part, future: concurrent.futures.Future[Any]) -> None:
        self._ahead.pop(part, None)

    def _is_cached(self, part: Part) -> bool:
        """Whether the cache has a part, which is noted to be in use."""
        version = self._known(part.file)
        return version is not None and all(
            self._cache.has(name_of(self.path_of(part.file), version.cache_tag, *piece))
            for piece in _pieces(part, version.size_bytes)
        )

    def sizes(self, files: Sequence[int | str]) -> list[int | None]:
        """See `Folder.sizes`."""
        started = {file: fetcher().run(self._version(file)) for file in files if self._known(file) is None}
        found = {file: result_of(future, self.path_of(file)) for file, future in started.items()}
        versions = [found[file] if file in found else self._known(file) for file in files]
        return [None if version is None else version.size_bytes for version in versions]

    def check(self, files: Sequence[str]) -> None:
        """See `Folder.check`. Asks the store."""
        started = {file: fetcher().run(self._origin.version(self._url.below(file))) for file in files}
        try:
            for file, future in started.items():
                version = self.versions[file]
                assert version is not None
                version.check(result_of(future, self.path_of(file)), self.path_of(file))
        except FeedError:
            for name, version in list(self.versions.items()):
                if version is None:  # it may be there once the store has recovered
                    del self.versions[name]
            raise

    @property
    def can_list(self) -> bool:
        """See `Folder.can_list`."""
        return self._url.can_list

    def folders(self, below: str = "") -> list[str]:
        """See `Folder.folders`."""
        return sorted(folders(self._url.below(below) if below else self._url, self._options))

    def select(self, numbers: Indices) -> StoreFolder:
        """See `Folder.select`."""
        chosen = numbers.tolist()
        names, tags = (
            Names([os.fsencode(table[number]) for number in chosen]) for table in (self.names, self._listed.tags)
        )
        versions = _Versions(self._listed.sizes[numbers], tags)
        return StoreFolder(self._url, self._options, names, versions, None, self._origin)

    def close(self) -> None:
        """See `Folder.close`."""
        for future in list(self._ahead.values()):
            future.cancel()

    def _known(self, file: int | str) -> Version | None:
        return self._listed.of(file) if isinstance(file, int) else self.versions.get(file)

    def _bytes_in(self, part: Part, guess: int | None) -> int:
        version = self._known(part.file)
        if version is None:
            return guess or REQUEST_BYTES
        start, stop, _ = slice(part.start, part.stop).indices(version.size_bytes)
        return max(0, stop - start)

    async def _bytes_of(self, part: Part) -> bytes | None:
        version = await self._version(part.file)
        if version is None:
            return None
        url = self._url.below(self.names[part.file] if isinstance(part.file, int) else part.file)

        start, stop, _ = slice(part.start, part.stop).indices(version.size_bytes)
        get = functools.partial(cached, self._cache, self._origin, url, version, start, stop)
        return await self._getting.once(part, get)

    async def _version(self, file: int | str) -> Version | None:
        if isinstance(file, int):
            return self._listed.of(file)
        if file not in self.versions:
            self.versions[file] = await self._asking.once(file, functools.partial(self._asked_version, file))
        return self.versions[file]

    async def _asked_version(self, name: str) -> Version | None:
        expected = self._expected.get(name)
        try:
            version = await self._origin.version(self._url.below(name))
        except FileNotFoundError:
            if expected is not None:
                raise changed(self.path_of(name), "it cannot be found any more") from None
            return None
        if expected is not None:
            expected.check(version, self.path_of(name))
        return version

    def __reduce__(self) -> Any:
        given = self._url, self._options, self.names, self._listed, None, self._origin
        return StoreFolder, given


def _pieces(part: Part, size: int) -> list[tuple[int, int]]:
    """Start and stop of the pieces of a part, none larger than a request."""
    start, stop, _ = slice(part.start, part.stop).indices(size)
    stop = max(start, stop)
    return [(at, min(at + REQUEST_BYTES, stop)) for at in range(start, max(stop, start + 1), REQUEST_BYTES)]


def open_folder(address: str, store: Store | None = None, versions: Mapping[str, Any] | None = None) -> Folder:
    """A folder whose files are found by their names when they are read.

    Args:
      address: path or address.
      versions: that files must have: from the `Folder.versions` of another process.
    """
    if is_url(address):
        return StoreFolder(_folder_url(address), store or Store(), versions=versions)
    return LocalFolder(address, versions=versions)


def listed_folder(address: str, store: Store | None = None) -> Folder:
    """A folder with the names of its files at any depth, sorted by the parts of their paths.

    Hidden files and folders are left out. So are, in a store, the empty objects that some programs write for
    folders.

    Raises:
      ValueError: a link to nothing; a web server, which lists no files.
      FeedError: the store cannot be read.
    """
    if not is_url(address):
        return LocalFolder(address, Names(list(_files_below(os.fsencode(address), b"", 0))))
    url, options = _folder_url(address), store or Store()
    if not url.can_list:
        raise ValueError(
            f"a web server does not list its files, so a folder must lie in s3:// or gs://, got {address}; open "
            "it there, or write its files to tar or TFRecord"
        )
    prefix = f"{url.key}/" if url.key else ""
    found = {each.url.key[len(prefix) :]: each for each in listing(Url(url.base, prefix), options)}
    found = {name: each for name, each in found.items() if not any(p.startswith(".") for p in name.split("/"))}
    if any("/" in name for name in found):  # then an empty object may stand for a folder, also for an empty one
        inner = {name[: name.index("/")] for name in found if "/" in name}
        inner |= {name.rpartition("/")[0] for name in found}
        found = {
            name: each
            for name, each in found.items()
            if each.version.size_bytes or not ("/" not in name or name in inner)
        }
    return _of_listed(url, options, [found[name] for name in sorted(found, key=lambda name: name.split("/"))])


def folder_of(files: Sequence[str] | Sequence[Listed], store: Store | None = None) -> Folder:
    """A folder of these files, in this order, listed relative to the deepest folder that holds all of them.

    Args:
      files: local paths, or objects that a store listed (`origin.matches`).
    """
    listed = [file for file in files if isinstance(file, Listed)]
    paths = [file.url.key if isinstance(file, Listed) else file for file in files]
    common = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    if listed:
        return _of_listed(Url(listed[0].url.base, common), store or Store(), listed)
    return LocalFolder(common, Names([os.fsencode(os.path.relpath(path, common or ".")) for path in paths]))


def _of_listed(url: Url, options: Store, listed: Sequence[Listed]) -> StoreFolder:
    skipped = len(url.key) + 1 if url.key else 0
    names = Names([os.fsencode(each.url.key[skipped:]) for each in listed])
    tags = Names([f"{each.version.tag}\n{each.version.nonce}".encode() for each in listed])
    sizes = np.array([each.version.size_bytes for each in listed], np.int64)
    return StoreFolder(url, options, names, _Versions(sizes, tags))


def _folder_url(address: str) -> Url:
    url = Url.parse(address)
    return Url(url.base, url.key.removesuffix("/"))


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


class Shared(Generic[T]):
    """Requests that several wait for. One that all of them gave up is cancelled. For the fetching thread."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, tuple[asyncio.Task[T], list[None]]] = {}
        """By key, the request, and a list with an element for each caller that waits for it."""

    async def once(self, key: Hashable, get: Callable[[], Awaitable[T]]) -> T:
        """What `get` returns, which is called once for all that wait for this key meanwhile."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(_awaited(get())), []
        task, waiting = self._tasks[key]
        waiting.append(None)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.pop()
            if not waiting:
                task.cancel()
            if (task.done() or not waiting) and self._tasks.get(key, (None,))[0] is task:
                del self._tasks[key]


async def _awaited(result: Awaitable[T]) -> T:
    return await result


# --- listings ---


def matches(url: str, options: Store) -> list[Listed] | None:
    """The objects, or Zarr folders, that a glob matches, in sorted order; None of an address that is no glob.

    Raises:
      FileNotFoundError: no match.
      ValueError: no address, or a glob where the store does not list its keys.
      FeedError: the store cannot be read.
    """
    parsed = Url.parse(url)
    if not parsed.is_glob:
        return None
    if not parsed.can_list:
        raise ValueError(
            f"a web server does not list its files, so http:// and https:// take no globs, got {url}; write a "
            "glob over s3:// or gs://, or name each file"
        )
    try:
        pattern = re.compile(_expression(parsed.key))
    except re.error as error:
        raise ValueError(f"{url} is no glob ({error}); write a character that stands for itself as [?]") from error
    above = Url(parsed.base, parsed.key.rpartition("/")[0])
    if parsed.key.endswith(_FOLDER_SUFFIX) and not above.is_glob:
        within = [Url(parsed.base, f"{above.key}/{name}".lstrip("/")) for name in folders(above, options)]
        found = [Listed(url, Version(0, "")) for url in sorted(within) if pattern.fullmatch(url.key)]
        if found:
            return found
    listed = listing(Url(parsed.base, re.split(r"[*?\[]", parsed.key, maxsplit=1)[0]), options)
    found = [each for each in listed if pattern.fullmatch(each.url.key)]
    if not found:
        raise FileNotFoundError(f"no object matches {url}; check the bucket and the pattern")
    return found


def folders(prefix: Url, options: Store) -> tuple[str, ...]:
    """The names of the folders in a folder of a bucket. Errors as of `listing`."""
    client = client_of(prefix.base)
    return _listed(prefix, options, lambda: client.folders(prefix.key, options.patience_s))


def listing(prefix: Url, options: Store) -> list[Listed]:
    """All objects of a bucket whose keys begin with that of `prefix`, in sorted order.

    Raises:
      FeedError: the store cannot be read.
    """
    client = client_of(prefix.base)
    return _listed(prefix, options, lambda: client.list(prefix.key, options.patience_s))


def _listed(prefix: Url, options: Store, request: Callable[[], Awaitable[T]]) -> T:
    return fetcher().run(fetcher().patiently(str(prefix), options.patience_s, None, request)).result()


def _expression(pattern: str) -> str:
    """A glob as a regular expression, of what the module glob matches: "**/" stands for any folders."""
    *above, last = pattern.split("/")
    return "".join("(?:[^./][^/]*/)*" if part == "**" else f"{_part(part)}/" for part in above) + _part(last)


def _part(pattern: str) -> str:
    """A glob of one name as a regular expression: only one that begins with a dot matches hidden names."""
    parts = [] if pattern.startswith(".") else [r"(?!\.)"]
    for token in re.findall(r"\*|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL):
        if token in ("*", "?"):
            parts.append("[^/]" + token.replace("?", ""))
        elif len(token) > 2 and token[0] == "[":
            parts.append("(?!/)" + token.replace("[!", "[^", 1).replace("\\", r"\\"))
        else:
            parts.append(re.escape(token))
    return "".join(parts)
