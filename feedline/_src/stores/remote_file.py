"""An object in a store as a file that is open for reading."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

from feedline._src.stores.remote_object import RemoteObject

SMALL_BYTES = 1 << 14
"""What is read at once of headers."""
_EXACT_BYTES = 1 << 17
"""Up to this size, as of headers and footers, only these bytes are fetched, and not the blocks that hold them."""


class RemoteFile(io.RawIOBase):
    """Reads of an object, the small ones without the blocks that hold them. For one thread.

    Args:
      item: the object. The file does not own it.
      sequential: most of it is read, from its start to its end: blocks are fetched ahead.
    """

    def __init__(self, item: RemoteObject, sequential: bool = False) -> None:
        self._item = item
        self._sequential = sequential
        self._at = 0

    def readable(self) -> bool:
        """As of any file."""
        return True

    def seekable(self) -> bool:
        """As of any file."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._item.size}[whence]
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """As of any file."""
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, wanted: int) -> bytes:
        if self._sequential:
            self._item.read_on_from(self._at)
        elif wanted <= _EXACT_BYTES and not self._item.comes(self._at, wanted):
            return self._item.samples([(self._at, wanted)])[0]
        return self._item.read(self._at, wanted)


def open_object(item: RemoteObject, sequential: bool = False) -> BinaryIO:
    """An object as a buffered file. Arguments as of a `RemoteFile`."""
    return cast(BinaryIO, io.BufferedReader(RemoteFile(item, sequential), SMALL_BYTES))
