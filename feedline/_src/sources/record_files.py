"""The indexed way to read: records of bytes in files, found by an index or by a library.

An index says where the records of a file lie. It is made once, and kept beside the file: one line, the CRC-32 of a
JSON object and that object; then little-endian int64[records, parts, 4], the `ENTRY` of each part of each record.
It belongs to one version of its file: size, time of modification and sampled bytes. One that is damaged, or of
another version, is made again. A file that was built again may have the old version, but not the old headers,
which are compared when a record is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.files.cache import in_folder
from feedline._src.files.file import File, FileVersion, LruCache, OpenFile, changed, unreadable
from feedline._src.files.files import Files
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import Format
from feedline._src.formats.table import ENTRY, BadRecordError, RecordReader, Records, Scan, described
from feedline._src.rows.shards import Indices, Shards
from feedline._src.rows.source import EncodedSource, Indexed, Record, Source, WillRead
from feedline._src.rows.spec import RowSpec

_RECORDS_AT_ONCE = 1 << 11  # fewer are slower to read, more leave the processor's cache
_INDEX_FORMAT = 3  # an index with another number is made again
_INDEX_SUFFIX = ".feedline-index"
_MAX_HEADER_BYTES = _BLOCK_BYTES = 1 << 20
_TRIES = 10  # to open or read an index that other processes delete or replace meanwhile


# --- sources ---


def open_records(format: Format, files: Files, options: OpenOptions) -> RecordFiles | RecordArrays:
    """The rows of files of records: bytes, or arrays if the format or the options say how to make them.

    Args:
      options: `columns` selects fields.

    Raises:
      ValueError: no records, not of this format, or files with different fields.
      OSError: no index can be written.
      FeedError: a file was changed, or a store cannot be read.
    """
    assert format.open is not None
    first = next((number for number, file in enumerate(files) if file.size), 0)
    form = files.opened(first, functools.partial(format.open, options=options))
    return (RecordFiles if form.unpack is None else RecordArrays)(format, form, files, options)


class _Records(Indexed):
    """Files of records. Thread-safe. With an index, at most 64 files are open, and nothing is held in memory."""

    def __init__(self, format: Format, form: Records, files: Files, options: OpenOptions) -> None:
        self._format, self.form, self._files, self._options = format, form, files, options
        self._paths = files.paths
        self._indexed: list[IndexedFile] = []
        if form.open is not None:
            files.local_paths()  # fetches all objects at once
            self._readers: Sequence[RecordReader] = [form.open(file) for file in files]
            self._digests = files.digests
        else:
            self._digests = files.digests
            self._readers = self._indexed = [
                IndexedFile(file, digest, format.name, form, files.open_files)
                for file, digest in zip(files, self._digests, strict=True)
            ]
        self._shards = Shards([reader.count for reader in self._readers])
        if len(self._shards) == 0:
            raise ValueError(
                f"a source must have at least one row, got {self._paths[0]} with no records; check what wrote it"
            )
        self._parts = self._chosen_parts()
        """The parts of a record that are read; None: it is one part."""
        self._fields = self._parts if form.leaves is None else tuple(form.leaves)

    def _chosen_parts(self) -> tuple[str, ...] | None:
        found = [(path, r.fields) for path, r in zip(self._paths, self._readers, strict=True) if r.count]
        first_path, first = found[0]
        for path, fields in found:
            if set(fields or ()) != set(first or ()):
                raise ValueError(
                    f"all files must have the same fields, and {path} has {', '.join(fields or ())}, {first_path} "
                    f"{', '.join(first or ())}; open them apart, or write them again"
                )
        return None if first is None else tuple(self._options.chosen(first, first_path))

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        for file in self._files:
            file.check()
        fields = None if self._fields is None else list(self._fields)
        return {"kind": self._format.name, "files": self._digests, "fields": fields}

    def __len__(self) -> int:
        return len(self._shards)

    def _read(self, rows: Indices) -> Iterator[tuple[int, Indices, Indices, list[Any]]]:
        """The rows in pieces that are fast to read: file, ascending records, their offsets in `rows`, data."""
        if self.will_read is not None:
            self.will_read(rows, 0)  # fetches of all files at once
        for number, local, offsets in self._shards.split(rows):
            order = np.argsort(local, kind="stable")
            here, ordered = np.arange(len(rows))[offsets][order], local[order]
            for start in range(0, len(order), _RECORDS_AT_ONCE):
                some = slice(start, start + _RECORDS_AT_ONCE)
                yield number, ordered[some], here[some], self._data(number, ordered[some])

    def _data(self, number: int, records: Indices) -> list[Any]:
        try:
            return self._readers[number].read(records, self._parts)
        except BadRecordError as error:
            raise self._error(
                number,
                error.record,
                f"a record must be read as it was written, and of record {error.record} {error}, or take another "
                "row in its place with feedline.Reading(bad_rows='substitute')",
            ) from error
        except (OSError, MemoryError) as error:
            path = getattr(error, "filename", None) or self._paths[number]
            raise unreadable(error, int(self._shards.firsts[number] + records[0]), path) from error

    def _error(self, number: int, record: int, message: str) -> RowError:
        """The error for a record of a file."""
        row = int(self._shards.firsts[number] + record)
        return RowError(message, stage="read", row=row, file=self._paths[number])

    @property
    def will_read(self) -> WillRead | None:
        """For objects in a store; None for files."""
        return self._fetch_ahead if self._indexed and self._files.in_store else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        parts = self._shards.split(rows)
        places = ((number, *self._indexed[number].places(local, self._parts)) for number, local, _ in parts)
        return self._files.will_read(places, ahead)

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._shards.of(np.array([row]))[0])]

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._files.close()
        for reader in self._readers:
            reader.close()

    def __reduce__(self) -> Any:
        return open_records, (self._format, self._files, self._options)


class RecordFiles(_Records, EncodedSource):
    """An `EncodedSource` over files of records. Arguments are those of `_Records`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fields, self.instead = self._fields, self.form.instead

    def records(self, rows: Indices) -> Sequence[Record]:
        """See `EncodedSource`. IndexError: there is no such row."""
        found: list[Record] = [b""] * len(rows)
        for _, _, offsets, data in self._read(rows):
            for offset, record in zip(offsets.tolist(), data, strict=True):
                found[offset] = record
        return found

    def _described(self) -> list[tuple[str, str]]:
        if self.form.leaves is None:
            return super()._described()
        return [(name, described(leaf)) for name, leaf in self.form.leaves.items()]


class RecordArrays(_Records, Source):
    """A `Source` over files of records, many of which are unpacked at once. Arguments are those of `_Records`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spec = RowSpec.of(self.form.spec).structs

    def read(self, rows: Indices, out: Any) -> None:
        """See `Source`. RowError: also a record that cannot be unpacked."""
        targets = jax.tree_util.tree_leaves(out)
        for number, records, offsets, data in self._read(rows):
            leaves = jax.tree_util.tree_leaves(self._unpacked(number, records, data))
            for target, values in zip(targets, leaves, strict=True):
                target[offsets] = values

    def _unpacked(self, number: int, records: Indices, data: list[Any]) -> Any:
        """Records of one file as a tree of arrays. The error names the first that cannot be unpacked."""
        assert self.form.unpack is not None
        try:
            return self.form.unpack(data)
        except ValueError as error:
            if len(data) == 1:
                raise self._error(number, records[0], str(error)) from error
            for i in range(len(data)):
                self._unpacked(number, records[i : i + 1], data[i : i + 1])
            raise


# --- files with an index ---


@dataclasses.dataclass(frozen=True)
class Index:
    """An index file that was validated when it was opened.

    Attributes:
      version: of the index file. Another process may replace it by an equal one.
      start: where its entries begin.
      count: the number of records.
      fields: those of a `Scan`.
    """

    path: str
    version: FileVersion
    start: int
    count: int
    fields: tuple[str, ...] | None


class IndexedFile:
    """A `RecordReader` of a file with an index, neither of which is held in memory.

    Args:
      digest: that of the file.
      name: of the format.
      open_files: open index files.

    Raises:
      ValueError: the file is not of this format.
      OSError: the index can be written neither beside the file nor into the cache folder.
      FeedError: the file changed meanwhile, or cannot be read.
    """

    def __init__(
        self, file: File, digest: list[Any], name: str, form: Records, open_files: LruCache[OpenFile]
    ) -> None:
        self._file, self._form, self._open_files = file, form, open_files
        self._belongs = {"index": _INDEX_FORMAT, "of": name, "file": [*digest, file.stamp]}
        self._index = self._open_index()
        self.count, self.fields = self._index.count, self._index.fields

    def close(self) -> None:
        """No-op: open files belong to the `Files` of the source."""

    def places(self, records: Indices, fields: Sequence[str] | None) -> tuple[Indices, Indices]:
        """Offsets and lengths of these records. Errors as of `read`."""
        offset, header, length, _ = self._entries(records, fields).reshape(-1, ENTRY).T
        return offset, header + length

    def read(self, records: Indices, fields: Sequence[str] | None) -> list[Record]:
        """See `RecordReader`. FeedError: also an index that is not that of the file."""
        entries = self._entries(records, fields)
        width, flat = entries.shape[1], entries.reshape(-1, ENTRY)
        offset, header, length, _ = flat.T
        # header and data apart, since cutting the header off a large part would copy it
        offsets, lengths = np.stack([offset, offset + header], 1), np.stack([header, length], 1)
        stored = self._file.read(offsets.ravel(), lengths.ravel())
        data = []
        for i, (record, (_, _, size, checksum)) in enumerate(
            zip(np.repeat(records, width).tolist(), flat.tolist(), strict=True)
        ):
            if zlib.crc32(stored[2 * i]) != checksum:
                raise self._mismatch(
                    f"has another header of record {record} than the file, which was built again with the same "
                    "size and time, or is damaged"
                )
            data.append(self._data_of(stored[2 * i + 1], size, record))
            stored[2 * i + 1] = b""  # frees it, so that the copy of the next part needs no new pages
        if fields is None:
            return data
        return [dict(zip(fields, data[i : i + width], strict=True)) for i in range(0, len(data), width)]

    def _data_of(self, part: bytes, size: int, record: int) -> Any:
        try:
            if len(part) != size:
                raise ValueError(f"{size - len(part)} bytes of it are missing")
            return self._form.data_of(part)
        except ValueError as error:
            raise BadRecordError(record, str(error)) from error

    def _entries(self, records: Indices, fields: Sequence[str] | None) -> Indices:
        """int64[k, parts, 4]: the entries of these records, all of which lie within the file."""
        size, names = self._file.size, self.fields or ("",)
        stored = self._stored(records, 8 * ENTRY * len(names))
        parts = np.frombuffer(stored, "<i8").reshape(len(records), len(names), ENTRY)
        if fields is not None:
            parts = parts[:, [names.index(field) for field in fields]]
        places = parts[:, :, :3]
        if not ((places >= 0) & (places <= size)).all() or (places.sum(axis=2) > size).any():
            raise self._mismatch(f"names bytes beyond the {size} of the file")
        return parts.astype(np.int64, copy=False)

    def _stored(self, records: Indices, width: int) -> bytes:
        """The bytes of these records in the index, `width` each.

        An index that was deleted, written to, or replaced by an equal one since it was validated is opened again.
        """
        for _ in range(_TRIES):
            index = self._index
            with contextlib.suppress(FileNotFoundError, FeedError):
                open_file = functools.partial(OpenFile, index.path, index.version)
                opened = self._open_files.get((index.path, index.version), open_file)
                found = b"".join(opened.read(index.start + records * width, np.full(len(records), width)))
                opened.check()
                return found
            self._index = self._open_index()
            if (self._index.count, self._index.fields) != (self.count, self.fields):
                raise changed(self._file.name, "it has other records")
        raise self._unstable()

    def _mismatch(self, found: str) -> FeedError:
        """No bad row: substitutes would hide that all rows have changed."""
        return FeedError(
            f"an index must be that of its file, and {self._index.path} {found}. Delete that index, which is then "
            "made again, and build a new feed",
            stage="read",
            file=self._file.name,
        )

    # --- the index file ---

    def _open_index(self) -> Index:
        """The index, which is made if there is none for this version of the file."""
        assert self._form.scan is not None
        places, scan = self._file.places_beside(_INDEX_SUFFIX), None
        for _ in range(_TRIES):
            for place in places:
                with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
                    return self._valid_index(place)
            if scan is None:
                scan = self._form.scan(self._file)
                self._file.check()
            else:  # no other process has made it meanwhile: replacing that would disturb its reads
                self._write_index(places, scan)
        raise self._unstable()

    def _valid_index(self, place: str) -> Index:
        """The index at `place`. ValueError and others: there is no whole index there that belongs to the file."""
        with open(place, "rb") as file:
            version = FileVersion.of(file.fileno())
            line = file.readline(_MAX_HEADER_BYTES)
            checksum, _, rest = line.partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(rest):
                raise ValueError("its first line is damaged")
            header = dict(json.loads(rest))
            fields = tuple(header["fields"]) if self._form.named else None
            names = fields or ("",)
            if {name: header.get(name) for name in self._belongs} != self._belongs:
                raise ValueError("it is of another file")
            if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
                raise ValueError("its fields are no names, or one is there twice")
            checksum_of_entries = 0
            while block := file.read(_BLOCK_BYTES):
                checksum_of_entries = zlib.crc32(block, checksum_of_entries)
            count, rest_bytes = divmod(file.tell() - len(line), 8 * ENTRY * len(names))
            if rest_bytes or (count and fields == ()) or checksum_of_entries != header["crc32"]:
                raise ValueError("it is damaged")
        return Index(place, version, len(line), count, fields)

    def _write_index(self, places: Sequence[str], scan: Scan) -> None:
        """Write an index to the first place that can be written to. Whoever can read the data can read it."""
        payload = np.asarray(scan.parts, "<i8").tobytes()
        header = self._belongs | {"fields": scan.fields, "crc32": zlib.crc32(payload)}
        text = json.dumps(header).encode() + b"\n"
        content = b"%08x " % zlib.crc32(text) + text + payload
        mode = 0o666 if self._file.in_store else os.stat(self._file.path()).st_mode & 0o666
        errors = []
        for place in places:
            folder = os.path.dirname(place)
            try:
                return in_folder(folder, functools.partial(_replace, place, content, mode))
            except OSError as error:
                errors.append(f"{place}: {error.strerror}")
        raise OSError(
            f"an index must be kept beside its file or in the cache folder, and neither can be written "
            f"({'; '.join(errors)}); set FEEDLINE_CACHE to a folder with space that this process may write"
        )

    def _unstable(self) -> OSError:
        return OSError(
            f"the index of {self._file.name} cannot be read although one was just written; check the disk, or set "
            "FEEDLINE_CACHE"
        )


def _replace(place: str, content: bytes, mode: int) -> None:
    """Write a file that appears whole, whatever number of processes write it at once."""
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
