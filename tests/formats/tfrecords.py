"""The bytes of TFRecord files. test_tfrecord.py compares them with those of another writer."""

import struct

import google_crc32c


def masked(data):
    """The checksum of data, as TFRecord stores it."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def encoded(records):
    """The bytes of a file with these records."""
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, struct.pack("<I", masked(length)), record, struct.pack("<I", masked(record))]
    return b"".join(parts)
