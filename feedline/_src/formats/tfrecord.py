"""TFRecord files: where their records lie, and the checksum of each."""

from __future__ import annotations

import functools
import struct
import zlib
from array import array
from collections.abc import Callable
from typing import BinaryIO

from feedline._src.files.file import File
from feedline._src.formats.registry import Format, require
from feedline._src.formats.table import ENTRY, Records, Scan, check_not_compressed

_HEADER = struct.Struct("<QI")  # length of the data, checksum of the length; then the data and its checksum
_CHECKSUM_BYTES = 4
_READ_BYTES = 1 << 14  # many small records; little beside large ones, which are skipped
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


def scan(file: File) -> Scan:
    """Where the records of a file lie: each part is the header of a record, its data and their checksum.

    Raises:
      ValueError: it is not a TFRecord file, or is compressed, damaged or truncated.
    """
    with file.open(sequential=True) as opened:
        return Scan(None, _parts(opened, file.size, file.name))


def _parts(file: BinaryIO, size_bytes: int, path: str) -> array[int]:
    crc32c = _crc32c()
    parts = array("q")
    at = start = 0
    block = b""
    while at < size_bytes:
        if at + _HEADER.size > start + len(block):
            start = file.seek(at)
            block = file.read(_READ_BYTES)
        header = block[at - start : at - start + _HEADER.size]
        record = f"record {len(parts) // ENTRY} of {path}, at byte {at}"
        if len(header) < _HEADER.size:
            raise _truncated(record, f"ends {_HEADER.size - len(header)} bytes too early")
        length, checksum = _HEADER.unpack(header)
        if masked(crc32c(header[:8])) != checksum:
            raise _damaged(path, record, at, header)
        stop = at + _HEADER.size + length + _CHECKSUM_BYTES
        if stop > size_bytes:
            raise _truncated(record, f"promises bytes up to {stop}, of {size_bytes}")
        parts.extend((at, _HEADER.size, length + _CHECKSUM_BYTES, zlib.crc32(header)))
        at = stop
    return parts


def data_of(part: bytes) -> bytes:
    """The data of a record.

    Raises:
      ValueError: its checksum is wrong.
    """
    data = part[:-_CHECKSUM_BYTES]
    if masked(_crc32c()(data)) != int.from_bytes(part[-4:], "little"):
        raise ValueError("its data has another checksum; the file is damaged, copy or write it again")
    return data


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    value: Callable[[bytes], int] = require("google_crc32c", "tfrecord").value
    return value


def masked(crc: int) -> int:
    """A CRC-32C as TFRecord stores it, so that the checksum of data that holds checksums stays a good one."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _truncated(record: str, found: str) -> ValueError:
    return ValueError(
        f"a TFRecord file must hold whole records, and {record}, {found}; the file is truncated, copy or write it "
        "again"
    )


def _damaged(path: str, record: str, at: int, header: bytes) -> ValueError:
    if at:
        return ValueError(
            f"the length of each record must have the checksum beside it, and that of {record}, has not; the file "
            "is damaged, copy or write it again"
        )
    check_not_compressed(header, path, _ZLIB)
    return ValueError(
        f"a TFRecord file begins with the length of a record and its checksum, and {path} with {header!r}; it is "
        "another format, or damaged: rename it, or write it again with tf.io.TFRecordWriter"
    )


FORMAT = Format(
    "tfrecord",
    (".tfrecord", ".tfrecords"),
    extra="tfrecord",
    way="records",
    open=lambda file, options: Records(scan, data_of=data_of),
)
