"""Tar archives as for WebDataset: adjacent members with the same key form a record; suffixes name its fields."""

from __future__ import annotations

import functools
import itertools
import re
import tarfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.record_index import IndexedFile, Scan
from feedline._src.formats.registry import Format
from feedline._src.formats.table import Grouped, by_rows, naming_file
from feedline._src.rows.shards import Indices

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)  # key.suffix; a hidden file has no key
_META = re.compile(r"(?:.*/)?__[^/]*__(?:/.*)?", re.DOTALL)  # names that are skipped, as in WebDataset
_BLOCK_BYTES = 512
_READ_BYTES = 1 << 20


def scan(file: File) -> Scan:
    """Locate the fields of each record."""
    remedy = (
        "write it again: tar --sort=name --dereference --hard-dereference -cf shard.tar folder, or with "
        "webdataset.TarWriter"
    )
    with file.open(sequential=True) as opened, naming_file(file.name, "a tar archive of records", remedy):
        return _scanned(opened, file.size)


def open_first(first: File, options: OpenOptions) -> Callable[..., Grouped]:
    """Return the function that opens each archive of a source. All must have the fields of the first archive."""
    fields = IndexedFile(first, "tar", scan, named=True).fields
    if not fields:
        raise ValueError(
            f"the first archive of a source determines its fields, so it must have records, and {first.name} has "
            "none; check what wrote it"
        )
    return functools.partial(_open, first.name, fields, options.chosen(fields, first.name))


FORMAT = Format("tar", (".tar",), takes=frozenset({"columns"}), open_first=open_first)


def _open(first: str, fields: Sequence[str], columns: Sequence[str], file: File, options: OpenOptions) -> Grouped:
    """The records of an archive. It must have the fields of the first one, or no records."""
    indexed = IndexedFile(file, "tar", scan, named=True)
    if indexed.count and set(indexed.fields or ()) != set(fields):
        raise ValueError(
            f"all files must have the same fields, and {file.name} has {', '.join(indexed.fields or ())}, but "
            f"{first} has {', '.join(fields)}; open them as separate sources, or write them again"
        )
    names = sorted(columns)  # the order of a dict's leaves in JAX

    def read_rows(leaves: Sequence[int], rows: Indices) -> list[list[bytes]]:
        parts = indexed.read(rows, [names[leaf] for leaf in leaves])
        return [parts[i :: len(leaves)] for i in range(len(leaves))]

    return by_rows(
        dict.fromkeys(columns, "bytes"),
        indexed.count,
        read_rows,
        row_extents=functools.partial(indexed.extents, fields=columns),
        are_dicts=True,
        instead="",
    )


def _scanned(opened: BinaryIO, size: int) -> Scan:
    fields: tuple[str, ...] | None = None
    first = ""
    parts = array("q")
    keys: set[str] = set()
    for key, members in itertools.groupby(_members(opened, size), lambda member: member.key):
        found: dict[str, tuple[int, int, int, int]] = {}
        for member in members:
            if key in keys or member.field in found:
                raise ValueError(
                    "the members of a record must be adjacent, with each field once, and "
                    f"{_short(member.name)} comes after members of other records, or a second time"
                )
            found[member.field] = member.entry
        keys.add(key)
        if fields is None:
            fields, first = tuple(found), key
        if found.keys() != set(fields):
            raise ValueError(
                f"all records must have the same fields, and {_short(key)} has {', '.join(found):.200}, but the "
                f"first record, {_short(first)}, has {', '.join(fields):.200}"
            )
        for field in fields:
            parts.extend(found[field])
    return Scan(fields or (), parts)


class _Member(NamedTuple):
    """A member that is a field of a record. `entry` locates it: see `record_index.ENTRY`."""

    name: str
    key: str
    field: str
    entry: tuple[int, int, int, int]


def _members(opened: BinaryIO, size: int) -> Iterator[_Member]:
    """Yield the fields of all records, in the order of the archive. ValueError: the archive is not complete."""
    opened.seek(0)
    archive = tarfile.open(fileobj=opened, mode="r:")  # noqa: SIM115  # closing it would not close the file
    at = -1
    while (info := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # otherwise, tarfile keeps all headers
        if info.offset <= at:
            raise ValueError(f"the header at byte {at} leads back to {info.offset}")
        at = info.offset
        split = _checked_name(info)
        if split is None:
            continue
        if info.size < 0 or info.offset_data + info.size > size:
            raise ValueError(
                f"members must lie within the archive, and {_short(info.name)} has {info.size} bytes from byte "
                f"{info.offset_data} on, but the archive has {size}"
            )
        opened.seek(at)
        header_bytes = info.offset_data - at  # several blocks for a long name
        checksum = zlib.crc32(opened.read(header_bytes))
        yield _Member(info.name, split[1], split[2].lower(), (at, header_bytes, info.size, checksum))
    if size - archive.offset < _BLOCK_BYTES:
        raise ValueError(f"it must end with blocks of zeros, and has none within its {size} bytes")
    opened.seek(archive.offset)  # `tarfile` stops here without an error, whatever follows
    while rest := opened.read(_READ_BYTES):
        if rest.strip(b"\0"):
            raise ValueError(f"it must end after its last member, and has data after byte {archive.offset}")


def _checked_name(info: tarfile.TarInfo) -> re.Match[str] | None:
    """Match the key and the field in a member's name. None if the member is not a field of a record."""
    if ".." in info.name.split("/"):
        raise ValueError(f"names must not lead out of a folder, and a member is named {_short(info.name)}")
    if info.isdir():
        return None
    if not info.isreg() or info.issparse():
        raise ValueError(f"members must be regular files, and {_short(info.name)} is a link, sparse or special")
    return None if _META.fullmatch(info.name) else _NAME.fullmatch(info.name)


def _short(name: str) -> str:
    """A name, shortened for an error: in a damaged archive it can be as long as the archive."""
    return f"{name!r:.200}"
