"""Files as records: all files of a folder or of a glob, with labels where they lie in class folders."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from feedline._src.files.client import Listed, Version
from feedline._src.files.open_files import pread, unreadable
from feedline._src.files.origin import Origin, listing
from feedline._src.files.store import Store, Url
from feedline._src.files.version import FileVersion, changed
from feedline._src.rows import digests
from feedline._src.rows.encoded_source import EncodedRows, Record
from feedline._src.rows.shards import Indices
from feedline._src.stores.many_objects import ManyObjects, Part, whole

_SAMPLED_FILES = 64


class FileNames:
    """The names of up to millions of files in little memory, in the order of their rows.

    Args:
      names: relative to the folder, as bytes of the file system.

    Example:
      >>> names = FileNames([b"a.jpg", b"b.jpg"])
      >>> len(names), names[1], names.digest == FileNames([b"a.jpgb.jpg"]).digest
      (2, 'b.jpg', False)
    """

    def __init__(self, names: Sequence[bytes]) -> None:
        self._joined = b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> str:
        return os.fsdecode(self._joined[self._ends[row] : self._ends[row + 1]])

    @property
    def digest(self) -> str:
        """Of all names and their order."""
        return hashlib.sha256(self._ends.tobytes() + self._joined).hexdigest()[:32]


class FolderSource(EncodedRows):
    """An `EncodedSource` whose records are whole files.

    Each read opens the file, so that no descriptor stays open. The version of a file is noted when it is first
    read; a file that was deleted, or differs from what was first read, is a `FeedError`.

    Args:
      folder: where the files lie.
      names: of the files below it, in the order of their rows.
      classes: the names of the class folders in sorted order, if the files lie in class folders.
      class_ends: for each class, the row after its last one.

    Attributes:
      fields: ("file", "label"), or None without classes.
      classes: the names of the classes, or None. A label is an index of it.
    """

    def __init__(
        self, folder: str, names: FileNames, classes: Sequence[str] | None = None, class_ends: Sequence[int] = ()
    ) -> None:
        self._folder = folder
        self._paths = [folder]
        self._names = names
        self.classes = classes
        self.fields = None if classes is None else ("file", "label")
        self._class_ends = np.asarray(class_ends, np.int64)
        self._seen_bytes = np.full(len(names), -1, np.int64)
        """The size of each file when it was first read; -1: not read yet. Written after _seen_ns."""
        self._seen_ns = np.zeros(len(names), np.int64)
        """Its time of modification then."""

    @property
    def identity(self) -> dict[str, Any]:
        """All names relative to the folder, and sizes and sampled bytes of up to 64 files."""
        sampled = np.unique(np.linspace(0, len(self) - 1, _SAMPLED_FILES).astype(np.int64))
        files = self._digests(sampled.tolist())
        return {"kind": "files", "count": len(self), "names": self._names.digest, "files": files}

    def _digests(self, rows: Sequence[int]) -> list[list[Any]]:
        """Size and sampled bytes of the files of some rows."""
        try:
            return [digests.of_file(self.file_of(row)) for row in rows]
        except OSError as error:
            raise changed(str(error.filename), f"it cannot be read ({error.strerror})") from error

    @property
    def files(self) -> Iterable[str]:
        """Their paths, in the order of the rows."""
        return map(self.file_of, range(len(self)))

    def __len__(self) -> int:
        return len(self._names)

    def records(self, rows: Indices) -> Sequence[Record]:
        """The files of these rows, as bytes or as {"file": bytes, "label": int}.

        Raises:
          IndexError: there is no such row.
          RowError: a file cannot be read.
          FeedError: a file was changed or deleted, or this process has too many open files.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise IndexError(f"rows are 0 to {len(self) - 1}, got {rows.min()} to {rows.max()}")
        files = self._read_all(rows.tolist())
        if self.classes is None:
            return files
        labels = np.searchsorted(self._class_ends, rows, side="right").tolist()
        return [{"file": file, "label": label} for file, label in zip(files, labels, strict=True)]

    def file_of(self, row: int) -> str:
        """The file of the row."""
        return os.path.join(self._folder, self._names[row])

    def _read_all(self, rows: Sequence[int]) -> list[bytes]:
        return [self._read(row) for row in rows]

    def _read(self, row: int) -> bytes:
        path = self.file_of(row)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                before = FileVersion.of_open(descriptor)
                data = pread(descriptor, before.size_bytes, 0)
                after = FileVersion.of_open(descriptor)
            finally:
                os.close(descriptor)
        except (OSError, MemoryError) as error:
            raise unreadable(error, row, path) from error
        if self._seen_bytes[row] >= 0:
            seen = int(self._seen_bytes[row]), int(self._seen_ns[row])
            before = before._replace(size_bytes=seen[0], modified_ns=seen[1])
        before.compare(after, path)
        if len(data) != after.size_bytes:
            raise changed(path, f"it has {len(data)} bytes and had {after.size_bytes}")
        self._seen_ns[row] = after.modified_ns
        self._seen_bytes[row] = after.size_bytes
        return data

    def _described(self) -> list[tuple[str, str]]:
        if self.classes is None:
            return super()._described()
        return [("file", "bytes"), ("label", f"int of {len(self.classes)} classes")]

    def __reduce__(self) -> Any:
        return FolderSource, (self._folder, self._names, self.classes, self._class_ends)


def open_folder(folder: str) -> FolderSource:
    """All files of a folder, or of its class folders, in sorted order; hidden files and folders are left out.

    Raises:
      ValueError: no files, files at several depths, or a link to nothing.
    """
    files, folders = _entries(folder)
    if files and folders and any(any(_entries(f"{folder}/{os.fsdecode(name)}")) for name in folders):
        raise mixed_error(folder, files[0], folders[0])
    if files:
        return FolderSource(folder, FileNames(files))
    names: list[bytes] = []
    ends = []
    for name in folders:
        inside, deeper = _entries(f"{folder}/{os.fsdecode(name)}")
        if deeper:
            raise deeper_error(folder, name, deeper[0])
        names += [name + b"/" + file for file in inside]
        ends.append(len(names))
    if not names:
        raise empty_error(folder)
    return FolderSource(folder, FileNames(names), [os.fsdecode(name) for name in folders], ends)


def mixed_error(folder: str, file: bytes, inner: bytes) -> ValueError:
    """The error for a folder with files beside folders."""
    if file == b"dataset_dict.json":  # of Hugging Face: DatasetDict.save_to_disk
        return ValueError(
            f"a source is the dataset of one split, and {folder} has a folder for each; open one of them: "
            f"open_source({os.path.join(folder, os.fsdecode(inner))!r})"
        )
    return ValueError(
        f"the files of a folder lie directly in it, or all of them in class folders, and {folder} has "
        f"{os.fsdecode(file)} beside the folder {os.fsdecode(inner)}; move one of them away, or "
        f"choose files by a glob: open_source({_glob_below(folder)!r})"
    )


def deeper_error(folder: str, name: bytes, deeper: bytes) -> ValueError:
    """The error for a class folder `name` with a folder in it."""
    where = f"{folder}/{os.fsdecode(name)}"
    return ValueError(
        "files lie in a folder or in its class folders, and not deeper, and "
        f"{where} has the folder {os.fsdecode(deeper)}; open {where} if its folders are the classes, "
        f"or take files at any depth, without labels, by a glob: open_source({_glob_below(folder)!r})"
    )


def empty_error(folder: str) -> ValueError:
    """The error for a folder without files."""
    return ValueError(
        f"a source must have at least one row, and the folder {folder} has no files that are not hidden; "
        "check the path"
    )


def open_files(paths: Sequence[str]) -> FolderSource:
    """These files, in this order, without labels.

    Raises:
      ValueError: one of them is a folder.
    """
    folder = next((path for path in paths if Path(path).is_dir()), None)
    if folder is not None:
        raise ValueError(
            f"a glob must match files, and {folder} is a folder; open a folder of class folders by its own path: "
            f"open_source({os.path.dirname(folder) or '.'!r})"
        )
    common = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    return FolderSource(common, FileNames([os.fsencode(os.path.relpath(path, common or ".")) for path in paths]))


def _glob_below(folder: str) -> str:
    return f"{glob.escape(folder)}/**/*.jpg"


def _entries(folder: str) -> tuple[list[bytes], list[bytes]]:
    """The names of the files and of the folders in a folder, both sorted. No file is looked at, but links are."""
    files: list[bytes] = []
    folders: list[bytes] = []
    with os.scandir(folder) as entries:
        for entry in _visible(entries):
            if entry.is_file():
                files.append(os.fsencode(entry.name))
            elif entry.is_dir():
                folders.append(os.fsencode(entry.name))
            elif entry.is_symlink():
                raise ValueError(
                    f"{entry.path} is a link to a file that does not exist; delete the link, or mend it"
                )
    return sorted(files), sorted(folders)


def _visible(entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in entries if not entry.name.startswith("."))


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
        """The `will_read` of a `ToldSource`."""
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
    """The files of a folder in a store: all objects whose keys begin with that of the folder.

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
