"""Tar archives as WebDataset writes them: adjacent members with one key are a record; suffixes are its fields."""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterable
from typing import BinaryIO

from feedline._src.files.file import File
from feedline._src.formats.registry import Format
from feedline._src.formats.table import Records, Scan

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # key.suffix; a hidden file has no key
_META = re.compile(r"(?:.*/)?__[^/]*__(?:/.*)?", re.DOTALL)  # what WebDataset leaves out too
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstandard
_BLOCK_BYTES = 512
_READ_BYTES = 1 << 20
_REWRITE = "write it again: tar --sort=name -cf shard.tar folder, or with webdataset.TarWriter"


def scan(file: File) -> Scan:
    """Where the fields of each record lie.

    Raises:
      ValueError: it is not a plain tar archive of regular files, or its records have different fields.
    """
    with file.open(sequential=True) as opened:
        return _scan(opened, file.size, file.name)


def _scan(file: BinaryIO, size_bytes: int, path: str) -> Scan:
    if file.read(_BLOCK_BYTES).startswith(_COMPRESSED):
        raise ValueError(
            f"an archive must not be compressed, since rows are read in any order, and {path} is; decompress it: "
            "gunzip or unzstd (images are compressed already)"
        )
    file.seek(0)
    bounded = _Bounded(file, size_bytes)
    samples = _Samples(path, bounded, size_bytes)
    try:
        archive = tarfile.open(fileobj=bounded, mode="r:")  # noqa: SIM115  # closing it would not close the file
        at = -1
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # else it keeps all headers
            if member.offset <= at:
                raise ValueError(f"the header at byte {at} leads back to {member.offset}")
            at = member.offset
            samples.add(member)
        end = archive.offset
    except _RefusedError:
        raise
    except Exception as error:  # tarfile does not document all types, and damaged headers give several
        raise ValueError(
            f"{path} cannot be read as a tar archive: {type(error).__name__}: {error}. It may be truncated or "
            f"another format; {_REWRITE}"
        ) from error
    _check_end(file, end, size_bytes, path)
    return samples.scan()


FORMAT = Format(
    "tar", (".tar",), takes=frozenset({"columns"}), way="records", open=lambda file, options: Records(scan)
)


class _RefusedError(ValueError):
    """An archive that can be read, but not as records."""


class _Samples:
    """The records of an archive, while its members come one by one."""

    def __init__(self, path: str, file: _Bounded, size_bytes: int) -> None:
        self._path = path
        self._file = file
        self._size_bytes = size_bytes
        self._fields: tuple[str, ...] | None = None
        self._first_key = ""
        self._parts: array[int] = array("q")
        self._keys: set[str] = set()
        self._key: str | None = None
        """The key of the record whose members are being collected."""
        self._found: dict[str, tuple[int, int, int, int]] = {}
        """The entry of each of its fields so far."""

    def add(self, member: tarfile.TarInfo) -> None:
        """Add the next member.

        Raises:
          _RefusedError: it does not fit.
        """
        name = member.name
        if ".." in name.split("/"):
            raise self._error(f"names must not lead out of a folder, and a member is named {_short(name)}")
        if member.isdir():
            return
        if not member.isreg() or member.issparse():
            kind = "sparse" if member.issparse() else "a link" if member.islnk() or member.issym() else "special"
            raise self._error(
                f"members must be regular files, and {_short(name)} is {kind}",
                "tar --dereference --hard-dereference writes files in place of links",
            )
        split = _NAME.fullmatch(name)
        if split is None or _META.fullmatch(name):
            return
        if member.size < 0 or member.offset_data + member.size > self._size_bytes:
            raise self._error(
                f"members must lie within the archive, and {_short(name)} has {member.size} bytes from byte "
                f"{member.offset_data} on, of {self._size_bytes}; the archive is truncated",
                "copy it again",
            )
        key, field = split[1], split[2].lower()
        if key != self._key:
            self._finish()
            if key in self._keys:
                raise self._error(
                    "the members of a record must be adjacent, and "
                    f"{_short(name)} comes after members of other records"
                )
            self._keys.add(key)
            self._key = key
        if field in self._found:
            raise self._error(f"a record must have each field once, and there are two members {_short(name)}")
        header_bytes = member.offset_data - member.offset  # of a long name several blocks
        self._file.seek(member.offset)
        checksum = zlib.crc32(self._file.read(header_bytes))
        self._found[field] = member.offset, header_bytes, member.size, checksum

    def _finish(self) -> None:
        """Add the record that is complete."""
        if self._key is None:
            return
        if self._fields is None:
            self._fields, self._first_key = tuple(self._found), self._key
        if self._found.keys() != set(self._fields):
            raise self._error(
                f"all records must have the same fields, and {_short(self._key)} has "
                f"{_listed(self._found)}, the first record, {_short(self._first_key)}, {_listed(self._fields)}"
            )
        for field in self._fields:
            self._parts.extend(self._found[field])
        self._found = {}

    def scan(self) -> Scan:
        """All records."""
        self._finish()
        return Scan(self._fields or (), self._parts)

    def _error(self, message: str, remedy: str = _REWRITE) -> _RefusedError:
        return _RefusedError(f"{message}, in {self._path}; {remedy}")


def _short(name: str) -> str:
    """A name for an error, which a damaged archive can make as long as itself."""
    return f"{name!r:.200}"


def _listed(fields: Iterable[str]) -> str:
    return f"{', '.join(fields):.200}"


def _check_end(file: BinaryIO, end: int, size_bytes: int, path: str) -> None:
    """Refuse an archive that does not end with a block of zeros. There `tarfile` stops without an error."""
    file.seek(end)
    rest = file.read(_BLOCK_BYTES)
    if len(rest) < _BLOCK_BYTES:
        raise ValueError(
            f"a tar archive must end with blocks of zeros, and {path} has none within its {size_bytes} bytes; it "
            "is truncated, copy or write it again"
        )
    while rest:
        if rest.strip(b"\0"):
            raise ValueError(
                f"a tar archive must end after its last member, and {path} has other bytes after byte {end}; "
                f"it is damaged, or several archives in one file: {_REWRITE}"
            )
        rest = file.read(_READ_BYTES)


class _Bounded(io.RawIOBase):
    """A file that never allocates more than it holds, whatever size a header promises."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size_bytes - self._file.tell())
        return self._file.read(left if size < 0 else min(size, left))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()
