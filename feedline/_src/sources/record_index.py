"""Index files, which say where the records of a file lie. They are made once, and kept beside the file.

An index is one line, the CRC-32 of a JSON object and that object, and then little-endian int64[records, parts, 4]:
where each part of each record lies, and the CRC-32 of its header. It belongs to one version of its file: size,
time of modification and sampled bytes. An index that is damaged, or of another version, is made again. A file that
was built again may have the version of the old one, but not its headers, which are compared when a record is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import in_folder
from feedline._src.files.file import File, Indices, LruCache, OpenFile, changed
from feedline._src.formats.table import ENTRY, BadRecordError, Records, Scan
from feedline._src.rows.source import Record

_FORMAT = 2  # an index with another number is made again
_SUFFIX = ".feedline-index"
_MOST_HEADER_BYTES = _READ_BYTES = 1 << 20
_TRIES = 10
"""Times that an index is made or opened while someone else deletes the cache folder."""


@dataclasses.dataclass(frozen=True)
class Index:
    """An index file, valid when it was opened.

    Attributes:
      line: its first line, which identifies it: another process may have replaced it by an equal one.
      digest: of the file of records.
      fields: as of a `Scan`.
      count: the number of records.
    """

    path: str
    line: bytes
    digest: list[Any]
    fields: tuple[str, ...] | None
    count: int


def open_index(file: File, digest: list[Any], name: str, form: Records) -> Index:
    """The index of a file of the format `name`, which is made if there is none for this version of it.

    Raises:
      ValueError: the file is not of this format.
      OSError: the index can be written neither beside the file nor into the cache folder.
      FeedError: the file changed meanwhile, or cannot be read.
    """
    assert form.scan is not None
    belongs = {"index": _FORMAT, "of": name, "file": [*digest, file.stamp]}
    scanned = None
    places = file.places_beside(_SUFFIX)
    for _ in range(_TRIES):
        for place in places:
            with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
                return _found(place, belongs, form.named)
        scanned = scanned or form.scan(file)
        file.check()
        _write(places, belongs, scanned, 0o666 if file.in_store else os.stat(file.path()).st_mode & 0o666)
    raise OSError(f"{places} cannot be read although one was just written; check the disk, or set FEEDLINE_CACHE")


def _found(place: str, belongs: dict[str, Any], named: bool) -> Index:
    """The index at `place`. ValueError and others: there is no whole index there that belongs to the file."""
    with open(place, "rb") as file:
        line = file.readline(_MOST_HEADER_BYTES)
        checksum, _, rest = line.partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(rest):
            raise ValueError("its first line is damaged")
        header = json.loads(rest)
        fields, count = header["fields"], header["count"]
        names = [""] if fields is None and not named else fields
        if type(names) is not list or not all(type(name) is str for name in names):
            raise ValueError("its fields are no names")
        if type(count) is not int or len({*names}) != len(names):
            raise ValueError("its fields are impossible")
        size = len(line) + 8 * ENTRY * count * len(names)
        if {name: header.get(name) for name in belongs} != belongs or count < 0 or (count and not names):
            raise ValueError("it is of another file")
        checksum_of_rest = 0
        while block := file.read(_READ_BYTES):
            checksum_of_rest = zlib.crc32(block, checksum_of_rest)
        if file.tell() != size or checksum_of_rest != header["crc32"]:
            raise ValueError("it is damaged")
    return Index(place, line, belongs["file"][:2], tuple(fields) if named else None, count)


def _write(places: Sequence[str], belongs: dict[str, Any], scanned: Scan, mode: int) -> None:
    """Write an index to the first place that can be written to.

    The file appears whole, whatever number of processes write it at once. Whoever can read the data can read it.
    """
    fields, payload = scanned.fields, np.asarray(scanned.parts, "<i8").tobytes()
    count = len(scanned.parts) // ENTRY // (1 if fields is None else max(1, len(fields)))
    header = {**belongs, "fields": fields, "count": count, "crc32": zlib.crc32(payload)}
    text = json.dumps(header).encode() + b"\n"
    content = b"%08x " % zlib.crc32(text) + text + payload
    errors = []
    for place in places:
        try:
            return in_folder(os.path.dirname(place) or ".", functools.partial(_replace, place, content, mode))
        except OSError as error:
            errors.append(f"{place}: {error.strerror}")
    raise OSError(
        f"an index must be kept beside its file or in the cache folder, and neither can be written "
        f"({'; '.join(errors)}); set FEEDLINE_CACHE to a folder with space that this process may write"
    )


def _replace(place: str, content: bytes, mode: int) -> None:
    """Write a file under another name, and then give it its name."""
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(place) or ".", prefix=".feedline-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
        os.replace(temporary, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class IndexedFile:
    """A `RecordReader` of a file with an index. Neither of them is held in memory. `opened`: open index files."""

    def __init__(self, file: File, index: Index, name: str, form: Records, opened: LruCache[OpenFile]) -> None:
        self._file, self.index, self._name, self._form, self._opened = file, index, name, form, opened
        self.count, self.fields, self.digest = index.count, index.fields, index.digest

    def close(self) -> None:
        """No-op: open files belong to the `Files` of the source."""

    def places(self, records: Indices, fields: Sequence[str] | None) -> tuple[Indices, Indices]:
        """Offsets and lengths of these records. Errors as of `read`."""
        offset, header, length, _ = self._entries(records, fields).reshape(-1, ENTRY).T
        return offset, header + length

    def read(self, records: Indices, fields: Sequence[str] | None) -> list[Record]:
        entries = self._entries(records, fields)
        offset, header, length, _ = entries.reshape(-1, ENTRY).T
        # apart, since cutting the header off a large part would copy it; small ones are merged all the same
        offsets, lengths = np.stack([offset, offset + header], 1), np.stack([header, length], 1)
        stored = self._file.read(offsets.ravel(), lengths.ravel())
        width, numbers, data = entries.shape[1], records.tolist(), []
        for i, (_, _, wanted, checksum) in enumerate(entries.reshape(-1, ENTRY).tolist()):
            self._check_header(stored[2 * i], checksum, numbers[i // width])
            data.append(self._data(stored[2 * i + 1], wanted, numbers[i // width]))
            stored[2 * i + 1] = b""  # the copy of the next part gets its memory: new pages cost more than the copy
        if fields is None:
            return data
        return [dict(zip(fields, data[i : i + width], strict=True)) for i in range(0, len(data), width)]

    def _stored(self, records: Indices, width: int) -> bytes:
        """What the index has of these records, each of `width` bytes. It is made again if it was deleted or
        written to."""
        for _ in range(_TRIES):
            index = self.index
            with contextlib.suppress(FileNotFoundError, FeedError):  # the latter: it was written to
                opened = self._opened.get(index.path, functools.partial(OpenFile, index.path, None, index.line))
                found = b"".join(opened.read(len(index.line) + records * width, np.full(len(records), width)))
                with contextlib.suppress(FeedError):
                    opened.check()
                    if len(found) == len(records) * width:
                        return found
                self._opened.discard(index.path, opened)
            self.index = open_index(self._file, index.digest, self._name, self._form)
            if (self.index.count, self.index.fields) != (self.count, self.fields):
                raise changed(self._file.name, "it has other records")
        raise changed(index.path, f"that happened {_TRIES} times")

    def _entries(self, records: Indices, fields: Sequence[str] | None) -> Indices:
        """int64[k, parts, 4]: the entries of these records, all of which lie within the file."""
        size, names = self._file.size, self.fields or ("",)
        entries = self._stored(records, len(names) * ENTRY * 8)
        parts = np.frombuffer(entries, "<i8").reshape(len(records), len(names), ENTRY)
        if fields is not None:
            parts = parts[:, [names.index(field) for field in fields]]
        places = parts[:, :, :3]
        if not ((places >= 0) & (places <= size)).all() or (places.sum(axis=2) > size).any():
            raise self._wrong(f"names bytes beyond the {size} of the file")
        return parts.astype(np.int64, copy=False)

    def _check_header(self, found: bytes, checksum: int, record: int) -> None:
        """Refuse a file that was built again with its old version: its records lie elsewhere."""
        if zlib.crc32(found) != checksum:
            raise self._wrong(
                f"has another header of record {record} than the file, which was built again with the same size "
                "and time, or is damaged"
            )

    def _wrong(self, found: str) -> FeedError:
        """No bad row: substitutes would hide that all rows have changed."""
        return FeedError(
            f"an index must be that of its file, and {self.index.path} {found}. Delete that index, which is then "
            "made again, and build a new feed",
            stage="read",
            file=self._file.name,
        )

    def _data(self, part: bytes, wanted: int, record: int) -> Any:
        try:
            if len(part) != wanted:
                raise ValueError(f"{wanted - len(part)} bytes of it are missing")
            return self._form.data_of(part)
        except ValueError as error:
            if record + 1 < self.count:  # the last record before those that moved has its header where it was
                ((offset, header, _, checksum), *_) = self._entries(np.array([record + 1]), None)[0].tolist()
                (following,) = self._file.read(np.array([offset]), np.array([header]))
                self._check_header(following, checksum, record + 1)
            raise BadRecordError(record, str(error)) from error
