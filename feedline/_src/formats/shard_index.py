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
import hashlib
import json
import os
import tempfile
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from feedline._src.files.opening import opening
from feedline._src.files.version import FileVersion
from feedline._src.rows import digests
from feedline._src.stores.cache import in_folder
from feedline._src.stores.client import Version
from feedline._src.stores.options import Store
from feedline._src.stores.remote_object import RemoteObject, open_object

_FORMAT = 2  # a file with another number is made again
ENTRY = 4
"""Integers of a part: offset and length of its header, length of the data after it, CRC-32 of the header."""
_MOST_HEADER_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_TRIES = 10


class Scan(NamedTuple):
    """Where the records of a file lie.

    Attributes:
      fields: the names of the parts of a record; None: a record is one part.
      parts: the `ENTRY` of each part of each record, in the order of the records and of `fields`.
    """

    fields: tuple[str, ...] | None
    parts: array[int]


class Form(NamedTuple):
    """A format of files that hold many records.

    Attributes:
      name: in the identity, and in the index.
      scan: (file, its size in bytes, its path) → where its records lie. ValueError if that cannot be read.
      data_of: the bytes of a part as stored → those that the user gets. ValueError if they are damaged.
    """

    name: str
    scan: Callable[[BinaryIO, int, str], Scan]
    data_of: Callable[[bytes], bytes]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of records with its index.

    Attributes:
      path, version: of the file.
      digest: its size and sampled bytes.
      index: the path of the index file.
      index_line: its first line, which identifies it: another process may have replaced it by an equal one.
      fields: as of a `Scan`.
      count: the number of records.
    """

    path: str
    version: FileVersion | Version
    digest: Sequence[Any]
    index: str
    index_line: bytes
    fields: tuple[str, ...] | None
    count: int


def open_shard(path: str, form: Form) -> Shard:
    """A file with its index, which is made if there is none for this version of the file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it is a folder, or not of this format.
      OSError: the index can be written neither beside the file nor into the cache folder.
      FeedError: the file changed meanwhile.
    """
    with opening(Path(path)) as file:
        version = FileVersion.of_open(file.fileno())
    digest = digests.of_file(path)
    belongs = {"index": _FORMAT, "of": form.name, "file": [*digest, version.modified_ns]}
    places = [_beside(path), _in_cache(path)]
    shard = next((found for place in places if (found := _found(place, path, version, belongs))), None)
    if shard is None:
        with open(path, "rb") as file:
            scanned = form.scan(file, version.size_bytes, path)
        version.check(path)
        place = _write(places, belongs, scanned, os.stat(path).st_mode)
        shard = _found(place, path, version, belongs)
    version.check(path)
    if shard is None:
        raise OSError(
            f"{place} cannot be read although it was just written; check the disk, or set FEEDLINE_CACHE"
        )
    return shard


def open_remote_shard(item: RemoteObject, form: Form, store: Store) -> Shard:
    """An object with its index, which lies in the cache folder. To make that, the object is read whole.

    Raises:
      ValueError: it is not of this format.
      OSError: the index cannot be written.
      FeedError: it cannot be read.
    """
    path, version = str(item.url), item.version
    digest = digests.of_samples(item.size, item.samples(digests.samples_of_file(item.size)))
    belongs = {"index": _FORMAT, "of": form.name, "file": [*digest, version.tag]}
    place = _remote_place(store, path)
    shard = _found(place, path, version, belongs) if version.is_strong else None
    if shard is None:
        scanned = form.scan(open_object(item, sequential=True), item.size, path)
        if not version.is_strong:  # another object may have the same `belongs`
            place = _remote_place(store, f"{path} {hashlib.sha256(scanned.parts).hexdigest()}")
        for _ in range(_TRIES):  # somebody may delete the cache meanwhile
            _write([place], belongs, scanned, 0o666)
            shard = _found(place, path, version, belongs)
            if shard is not None:
                return shard
        raise OSError(f"{place} cannot be read although it was just written; check the disk")
    return shard


def _remote_place(store: Store, of: str) -> str:
    name = hashlib.sha256(of.encode()).hexdigest()[:32]
    return os.path.join(store.folder, "index", f"{name}.feedline-index")


def _beside(path: str) -> str:
    """A hidden file, so that globs and folders of files leave it out."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.feedline-index")


def _in_cache(path: str) -> str:
    folder = os.environ.get("FEEDLINE_CACHE") or os.path.expanduser("~/.cache/feedline")
    whole = os.fsencode(os.path.abspath(path))
    return os.path.join(folder, "index", f"{hashlib.sha256(whole).hexdigest()[:32]}.feedline-index")


def _found(place: str, path: str, version: FileVersion | Version, belongs: dict[str, Any]) -> Shard | None:
    """The shard with the index at `place`; None if there is no whole index there that belongs to the file."""
    try:
        with open(place, "rb") as file:
            line = file.readline(_MOST_HEADER_BYTES)
            header = _header(line)
            if header is None or {name: header.get(name) for name in belongs} != belongs:
                return None
            fields, count, checksum = header["fields"], header["count"], header["crc32"]
            parts = 1 if fields is None else len(fields)
            size = os.fstat(file.fileno()).st_size
            if size != len(line) + 8 * ENTRY * parts * count or _checksum(file) != checksum:
                return None
    except (OSError, KeyError, TypeError):
        return None
    names = None if fields is None else tuple(fields)
    return Shard(path, version, belongs["file"][:2], place, line, names, count)


def _header(line: bytes) -> dict[str, Any] | None:
    """The JSON object of the first line of an index; None if it is not whole."""
    checksum, _, rest = line.partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(rest):
        return None
    try:
        header = json.loads(rest)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    fields, count = header.get("fields"), header.get("count")
    are_names = fields is None or (
        isinstance(fields, list)
        and all(isinstance(name, str) for name in fields)
        and len(set(fields)) == len(fields)
        and (len(fields) > 0 or count == 0)
    )
    return header if are_names and type(count) is int and count >= 0 else None


def _checksum(file: BinaryIO) -> int:
    checksum = 0
    while block := file.read(_READ_BYTES):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _write(places: Sequence[str], belongs: dict[str, Any], scanned: Scan, mode: int) -> str:
    """Write an index to the first place that can be written to, and return that place.

    The file appears whole, whatever number of processes write it at once.
    """
    fields = scanned.fields
    payload = np.asarray(scanned.parts, "<i8").tobytes()
    count = len(scanned.parts) // ENTRY // (1 if fields is None else max(1, len(fields)))
    header = {**belongs, "fields": fields, "count": count, "crc32": zlib.crc32(payload)}
    text = json.dumps(header).encode() + b"\n"
    content = b"%08x " % zlib.crc32(text) + text + payload
    errors = []
    for place in places:
        try:
            in_folder(os.path.dirname(place) or ".", functools.partial(_replace, place, content, mode & 0o666))
        except OSError as error:
            errors.append(f"{place}: {error.strerror}")
        else:
            return place
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
            os.fchmod(descriptor, mode)  # readable by whoever can read the data
        os.replace(temporary, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
