"""Where the record batches of an Arrow stream in a store lie. A stream has no index, so one is made once."""

from __future__ import annotations

import struct
from typing import BinaryIO

from feedline._src.sources.remote.flatbuffer import Table
from feedline._src.stores.remote_file import open_object
from feedline._src.stores.remote_object import RemoteObject

MARK = b"\xff\xff\xff\xff"
END = MARK + bytes(4)
_PREFIX = struct.Struct("<4si")  # mark, size of the metadata
_ENTRY = struct.Struct("<qqq")  # offset, size of the metadata with the prefix, size of the body
_KIND, _BODY = 1, 3  # fields of a message
_SCHEMA, _BATCH = 1, 3  # kinds of messages
_MOST_BYTES = 1 << 30
_INDEX = "arrow stream"


def messages_of(item: RemoteObject) -> list[tuple[int, bytes, int]]:
    """Of the schema and of each record batch: offset, metadata, and size of the body.

    Raises:
      ValueError: it is not a whole stream, or has dictionaries.
      struct.error, IndexError: its metadata are damaged.
      FeedError: it cannot be read.
    """
    (tail,) = item.samples([(max(0, item.size - len(END)), len(END))])
    if tail != END:
        raise ValueError("a stream must end with the mark of its end, and this one does not")
    found: list[tuple[int, bytes, int]] = []
    known = item.noted(_INDEX)
    if known is None:
        found = _walked(open_object(item, sequential=True), item.size)
        entries = b"".join(_ENTRY.pack(at, len(metadata), body) + metadata for at, metadata, body in found)
        item.note(_INDEX, entries)
        return found
    at = 0
    while at < len(known):
        offset, length, body = _ENTRY.unpack_from(known, at)
        at += _ENTRY.size + length
        found.append((offset, known[at - length : at], body))
    return found


def _walked(file: BinaryIO, size: int) -> list[tuple[int, bytes, int]]:
    """As `messages_of`, by the headers of all messages."""
    found: list[tuple[int, bytes, int]] = []
    at = 0
    while at < size - len(END):
        file.seek(at)
        prefix = file.read(_PREFIX.size)
        mark, length = _PREFIX.unpack(prefix)
        if mark != MARK or not 0 < length <= min(_MOST_BYTES, size - at):
            raise ValueError(f"no message begins at byte {at}")
        metadata = prefix + file.read(length)
        message = Table.root(metadata[_PREFIX.size :])
        kind, body = message.number(_KIND, "<B"), message.number(_BODY, "<q")
        if kind != (_BATCH if found else _SCHEMA):
            raise ValueError("a stream in a store has a schema, and then record batches without dictionaries")
        if not 0 <= body <= size - at - len(metadata):
            raise ValueError(f"the message at byte {at} leads out of it")
        found.append((at, metadata, body))
        at += len(metadata) + body
    if at != size - len(END):
        raise ValueError("bytes follow the mark of its end")
    return found
