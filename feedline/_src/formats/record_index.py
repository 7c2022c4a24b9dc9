"""Locates and reads the records of TFRecord files, tar archives and JSON lines, with an index file.

An index is made by one scan of a file, and kept beside it. The index begins with a line: the CRC-32 of a JSON
object, then this object. The rest is little-endian int64[records, parts, 4]: four integers (see `ENTRY`) for each
part of each record. (A part is a field, or a record without fields.) An index belongs to one version of its file,
identified by size, modification time and sampled bytes. If it is damaged, or of another version, it is made
again. Each read also checks the headers of its records, since a file may be rewritten with the same size, time
and samples.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import in_folder
from feedline._src.files.file import File, OpenFile, Version, changed
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices

ENTRY = 4
"""How many integers describe a part: offset and length of its header, length of its data, CRC-32 of the header."""
_INDEX_FORMAT = 3  # an index with another number is made again
_INDEX_SUFFIX = ".feedline-index"
_MAX_HEADER_BYTES = _BLOCK_BYTES = 1 << 20
_TRIES = 10  # to open or read an index that other processes delete or replace meanwhile


class Scan(NamedTuple):
    """The locations of the records of a file.

    Attributes:
      fields: the names of the parts of a record; None: a record is one part.
      parts: four integers (see `ENTRY`) for each part of record 0, in the order of `fields`, then for record 1 …
    """

    fields: tuple[str, ...] | None
    parts: array[int]


class Index(NamedTuple):
    """An index file that was validated when it was opened.

    Attributes:
      version: the version of the index file. Another process may replace this file by an equal one.
      start: the offset at which its entries begin.
      records: the number of records.
      fields: as in `Scan`.
    """

    path: str
    version: Version
    start: int
    records: int
    fields: tuple[str, ...] | None


class IndexedFile:
    """A file of records with its index, neither of which is held in memory. Thread-safe.

    Attributes:
      count: the number of records.
      fields: as in `Scan`.

    Args:
      name: the name of the format.
      scan: (file) → the locations of its records. Raises ValueError if the file is damaged, or in another format.
      named: whether the scan names fields.

    Raises:
      ValueError: see `scan`.
      OSError: the index can be written neither beside the file nor into the cache folder.
      FeedError: the file changed during its scan, or cannot be read.
    """

    def __init__(self, file: File, name: str, scan: Callable[[File], Scan], named: bool = False) -> None:
        self._file, self._scan, self._named = file, scan, named
        # an object needs no samples, since its stamp (such as the ETag) differs if its bytes do
        samples = [] if file.in_store else file.samples(digests.samples_of_file(file.size))
        self._belongs = {
            "index": _INDEX_FORMAT,
            "of": name,
            "file": [*digests.of_samples(file.size, samples), file.version.stamp],
        }
        self._index = self._open_index()
        self.count, self.fields = self._index.records, self._index.fields

    def extents(self, records: Indices, fields: Sequence[str] | None = None) -> tuple[Indices, Indices]:
        """Offsets and lengths of the bytes of these records. Raises FeedError and OSError as `read` does."""
        offset, header, length, _ = self._entries(records, fields).reshape(-1, ENTRY).T
        return offset, header + length

    def read(self, records: Indices, fields: Sequence[str] | None = None) -> list[bytes]:
        """Read the `fields` of these records, record by record. `fields` None: all fields.

        Raises:
          ValueError: bytes of a record are missing.
          FeedError: the file was changed, or does not match its index.
          OSError: the disk cannot be read.
        """
        entries = self._entries(records, fields)
        width, flat = entries.shape[1], entries.reshape(-1, ENTRY)
        offset, header, length, _ = flat.T
        # header and data are read separately, since slicing the header off a large part would copy the data
        offsets, lengths = np.stack([offset, offset + header], 1), np.stack([header, length], 1)
        stored = self._file.read(offsets.ravel(), lengths.ravel())
        headers, parts = stored[0::2], stored[1::2]
        for i, (_, _, size, checksum) in enumerate(flat.tolist()):
            if zlib.crc32(headers[i]) != checksum:
                raise self._mismatch(
                    f"does not match the header of record {records[i // width]} in the file, which was rewritten "
                    "with the same size and time, or is damaged"
                )
            if len(parts[i]) != size:
                raise ValueError(f"{size - len(parts[i])} bytes of it are missing")
        return parts

    def _entries(self, records: Indices, fields: Sequence[str] | None) -> Indices:
        """Return int64[k, parts, 4]: the entries of these records. Checks that all parts lie within the file."""
        size, names = self._file.size, self.fields or ("",)
        stored = self._stored(records, 8 * ENTRY * len(names))
        parts = np.frombuffer(stored, "<i8").reshape(len(records), len(names), ENTRY)
        if fields is not None:
            parts = parts[:, [names.index(field) for field in fields]]
        places = parts[:, :, :3]
        if not ((places >= 0) & (places <= size)).all() or (places.sum(axis=2) > size).any():
            raise self._mismatch(f"names bytes beyond the {size} bytes of the file")
        return parts.astype(np.int64, copy=False)

    def _stored(self, records: Indices, width: int) -> bytes:
        """Read the entries of these records from the index, `width` bytes for each record.

        If the index was deleted, written to, or replaced since it was validated, it is opened again.
        """
        for _ in range(_TRIES):
            index = self._index
            with contextlib.suppress(FileNotFoundError, FeedError):
                open_file = functools.partial(OpenFile, index.path, index.version)
                opened = self._file.open_files.get((index.path, index.version), open_file)
                found = b"".join(opened.read(index.start + records * width, np.full(len(records), width)))
                opened.check()
                return found
            self._index = self._open_index()
            if (self._index.records, self._index.fields) != (self.count, self.fields):
                raise changed(self._file.name, "it has other records than before")
        raise self._unstable()

    def _mismatch(self, found: str) -> FeedError:
        """Return the error for a mismatched index. It is no bad row: substitutes would hide changed rows."""
        return FeedError(
            f"an index must match its file, and {self._index.path} {found}. Delete that index, so that it is "
            "made again, and build a new feed",
            stage="read",
            file=self._file.name,
        )

    # --- the index file ---

    def _open_index(self) -> Index:
        """Open the index, and make it first if there is none for this version of the file."""
        places, scan = self._file.places_beside(_INDEX_SUFFIX), None
        for _ in range(_TRIES):
            for place in places:
                with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
                    return self._valid_index(place)
            if scan is None:
                scan = self._scan(self._file)
                self._file.check()
            else:  # still none after the scan, during which another process may have made one
                self._write_index(places, scan)
        raise self._unstable()

    def _valid_index(self, place: str) -> Index:
        """Open and validate the index at `place`. Raises errors of several types if it is missing or invalid."""
        with open(place, "rb") as file:
            version = Version.of(file.fileno())
            line = file.readline(_MAX_HEADER_BYTES)
            checksum, _, rest = line.partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(rest):
                raise ValueError("its first line is damaged")
            header = dict(json.loads(rest))
            fields = tuple(header["fields"]) if self._named else None
            names = fields or ("",)
            if {name: header.get(name) for name in self._belongs} != self._belongs:
                raise ValueError("it is of another file")
            if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
                raise ValueError("its fields are not names, or one occurs twice")
            checksum_of_entries = 0
            while block := file.read(_BLOCK_BYTES):
                checksum_of_entries = zlib.crc32(block, checksum_of_entries)
            records, rest_bytes = divmod(file.tell() - len(line), 8 * ENTRY * len(names))
            if rest_bytes or (records and fields == ()) or checksum_of_entries != header["crc32"]:
                raise ValueError("it is damaged")
        return Index(place, version, len(line), records, fields)

    def _write_index(self, places: Sequence[str], scan: Scan) -> None:
        """Write an index to the first writable place, with the read and write permissions of the file."""
        payload = np.asarray(scan.parts, "<i8").tobytes()
        header = self._belongs | {"fields": scan.fields, "crc32": zlib.crc32(payload)}
        text = json.dumps(header).encode() + b"\n"
        content = b"%08x " % zlib.crc32(text) + text + payload
        mode = 0o666 if self._file.in_store else os.stat(self._file.place).st_mode & 0o666
        errors = []
        for place in places:
            folder = os.path.dirname(place)
            try:
                return in_folder(folder, functools.partial(_replace, place, content, mode))
            except OSError as error:
                errors.append(f"{place}: {error.strerror}")
        raise OSError(
            f"an index must be kept beside its file or in the cache folder, and neither can be written "
            f"({'; '.join(errors)}); set FEEDLINE_CACHE to a folder with space that this process may write to"
        )

    def _unstable(self) -> OSError:
        return OSError(
            f"the index of {self._file.name} cannot be read although one was just written; check the disk, or set "
            "FEEDLINE_CACHE"
        )


def _replace(place: str, content: bytes, mode: int) -> None:
    """Write a file atomically, even if several processes write it at once."""
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(place), prefix=".feedline-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
        os.replace(temporary, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
