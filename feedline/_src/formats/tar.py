"""Tar archives as WebDataset writes them: adjacent members with one key are a record; suffixes are its fields."""

from __future__ import annotations

import contextlib
import itertools
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from feedline._src.files.file import File
from feedline._src.formats.registry import Format
from feedline._src.formats.table import Records, Scan, check_not_compressed

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # key.suffix; a hidden file has no key
_META = re.compile(r"(?:.*/)?__[^/]*__(?:/.*)?", re.DOTALL)  # what WebDataset leaves out too
_BLOCK_BYTES = 512
_READ_BYTES = 1 << 20
_REWRITE = "write it again: tar --sort=name -cf shard.tar folder, or with webdataset.TarWriter"


def scan(file: File) -> Scan:
    """Where the fields of each record lie.

    Raises:
      ValueError: it is not a plain tar archive of regular files, or its records have different fields.
    """
    fields: tuple[str, ...] | None = None
    first = ""
    parts = array("q")
    keys: set[str] = set()
    with file.open(sequential=True) as opened:
        for key, members in itertools.groupby(_members(opened, file.size, file.name), lambda member: member.key):
            found: dict[str, tuple[int, int, int, int]] = {}
            for member in members:
                if key in keys:
                    raise _refused(
                        file.name,
                        f"the members of a record must be adjacent, and {_short(member.name)} comes after members "
                        "of other records",
                    )
                if member.field in found:
                    raise _refused(
                        file.name,
                        f"a record must have each field once, and there are two members {_short(member.name)}",
                    )
                found[member.field] = member.entry
            keys.add(key)
            if fields is None:
                fields, first = tuple(found), key
            if found.keys() != set(fields):
                raise _refused(
                    file.name,
                    f"all records must have the same fields, and {_short(key)} has {_listed(found)}, the first "
                    f"record, {_short(first)}, {_listed(fields)}",
                )
            for field in fields:
                parts.extend(found[field])
    return Scan(fields or (), parts)


FORMAT = Format(
    "tar",
    (".tar",),
    takes=frozenset({"columns"}),
    way="records",
    open=lambda file, options: Records(scan, named=True),
)


class _Member(NamedTuple):
    """A member that is a field of a record, and the `ENTRY` of where it lies."""

    name: str
    key: str
    field: str
    entry: tuple[int, int, int, int]


def _members(file: BinaryIO, size_bytes: int, path: str) -> Iterator[_Member]:
    """The fields of all records, in the order of the archive, which must be whole."""
    check_not_compressed(file.read(_BLOCK_BYTES), path)
    file.seek(0)
    at = -1
    with _readable(path):
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # closing it would not close the file
    while True:
        with _readable(path):
            info = archive.next()
            archive.members = []  # type: ignore[attr-defined]  # else it keeps all headers
            if info is not None and info.offset <= at:
                raise ValueError(f"the header at byte {at} leads back to {info.offset}")
        if info is None:
            break
        at = info.offset
        split = _checked_name(info, path)
        if split is None:
            continue
        if info.size < 0 or info.offset_data + info.size > size_bytes:
            raise _refused(
                path,
                f"members must lie within the archive, and {_short(info.name)} has {info.size} bytes from byte "
                f"{info.offset_data} on, of {size_bytes}; the archive is truncated",
                "copy it again",
            )
        file.seek(at)
        header_bytes = info.offset_data - at  # of a long name several blocks
        checksum = zlib.crc32(file.read(header_bytes))
        yield _Member(info.name, split[1], split[2].lower(), (at, header_bytes, info.size, checksum))
    _check_end(file, archive.offset, size_bytes, path)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Name the archive in any error of `tarfile`, which does not document all types."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a tar archive: {type(error).__name__}: {error}. It may be truncated or "
            f"another format; {_REWRITE}"
        ) from error


def _checked_name(info: tarfile.TarInfo, path: str) -> re.Match[str] | None:
    """The key and the field that the name of a member says; None: it is no part of a record."""
    if ".." in info.name.split("/"):
        raise _refused(path, f"names must not lead out of a folder, and a member is named {_short(info.name)}")
    if info.isdir():
        return None
    if not info.isreg() or info.issparse():
        kind = "sparse" if info.issparse() else "a link" if info.islnk() or info.issym() else "special"
        raise _refused(
            path,
            f"members must be regular files, and {_short(info.name)} is {kind}",
            "tar --dereference --hard-dereference writes files in place of links",
        )
    return None if _META.fullmatch(info.name) else _NAME.fullmatch(info.name)


def _refused(path: str, message: str, remedy: str = _REWRITE) -> ValueError:
    return ValueError(f"{message}, in {path}; {remedy}")


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
