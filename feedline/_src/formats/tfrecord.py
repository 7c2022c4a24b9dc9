"""TFRecord files: locates their records, and verifies the checksum of each."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from feedline._src.files.file import File
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.record_index import ENTRY, IndexedFile, Scan
from feedline._src.formats.registry import Format, Library
from feedline._src.formats.table import Grouped, by_rows
from feedline._src.rows.shards import Indices

_HEADER = struct.Struct("<QI")  # the data's length, and a checksum of the length; the data and its checksum follow
_CHECKSUM_BYTES = 4
_READ_BYTES = 1 << 14  # covers many small records, and little of a large record, whose data is skipped
google_crc32c: Any = Library("google_crc32c", "tfrecord")


def scan(file: File) -> Scan:
    """Locate the records of a file. Each record is one part: header, data, and the checksum of the data."""
    crc32c = google_crc32c.value
    parts = array("q")
    at = start = 0
    block = b""
    with file.open(sequential=True) as opened:
        while at < file.size:
            if at + _HEADER.size > start + len(block):
                start = opened.seek(at)
                block = opened.read(_READ_BYTES)
            header = block[at - start : at - start + _HEADER.size]
            record = f"record {len(parts) // ENTRY} of {file.name}, at byte {at}"
            whole = len(header) == _HEADER.size
            length, checksum = _HEADER.unpack(header) if whole else (0, 0)
            if whole and masked(crc32c(header[:8])) != checksum:
                raise ValueError(
                    f"each record must begin with its length and the checksum of the length, and {record}, begins "
                    f"with {header!r}; the file is damaged, compressed as a whole (gunzip it), or in another "
                    "format: copy it again, or write it again with tf.io.TFRecordWriter"
                )
            stop = at + _HEADER.size + length + _CHECKSUM_BYTES
            if not whole or stop > file.size:
                raise ValueError(
                    f"a TFRecord file must hold whole records, and {record}, ends at byte {stop} or later, but "
                    f"the file has {file.size} bytes; it is truncated, copy or write it again"
                )
            parts.extend((at, _HEADER.size, length + _CHECKSUM_BYTES, zlib.crc32(header)))
            at = stop
    return Scan(None, parts)


def data_of(part: bytes) -> bytes:
    """The data of a record. Raises ValueError if its checksum is wrong."""
    data = part[:-_CHECKSUM_BYTES]
    if masked(google_crc32c.value(data)) != int.from_bytes(part[-4:], "little"):
        raise ValueError("its data does not match its checksum; the file is damaged, copy or write it again")
    return data


def masked(crc: int) -> int:
    """Mask a CRC-32C as TFRecord does, since a CRC of data that contains plain CRCs detects fewer errors."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def open_file(file: File, options: OpenOptions) -> Grouped:
    """The records of a file."""
    indexed = IndexedFile(file, "tfrecord", scan)

    def read_rows(leaves: Sequence[int], rows: Indices) -> list[list[bytes]]:
        records = indexed.read(rows)
        for i, record in enumerate(records):  # in place, to free each record before the next is copied
            records[i] = data_of(record)
        return [records]

    return by_rows({"row": "bytes"}, indexed.count, read_rows, row_extents=indexed.extents, instead="")


FORMAT = Format("tfrecord", (".tfrecord", ".tfrecords"), extra="tfrecord", open=open_file)
