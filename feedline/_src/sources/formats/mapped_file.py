"""A file mapped into memory, and arrays that are views of it."""

from __future__ import annotations

import mmap
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from feedline._src.sources.formats.file_version import FileVersion
from feedline._src.sources.formats.npy import Header


class Mapped(Protocol):
    """The bytes of a file or of an object in a store as memory, in which not all may be read at any time.

    Attributes:
      bytes: of which arrays may be views.
    """

    bytes: Any

    def array(self, header: Header, offset: int) -> npt.NDArray[Any]:
        """The array of a `.npy` that begins at byte `offset`: a view."""


class MappedObject:
    """The memory of an object in a store.

    Args:
      memory: all of its bytes, which must not be read before they were fetched.
    """

    def __init__(self, memory: memoryview) -> None:
        self.bytes = memory

    def array(self, header: Header, offset: int) -> npt.NDArray[Any]:
        """The array of a `.npy` that begins at byte `offset`: a view."""
        return np.ndarray(header.shape, header.dtype, self.bytes, offset + header.start, order=header.order)


class MappedFile:
    """All bytes of a file, read from disk when they are used. It keeps one file descriptor open.

    A file that is replaced or deleted stays mapped, with its old bytes. Writes to the file are visible in the
    mapping. An access beyond the end of a truncated file ends the process (SIGBUS), unless the gather in C makes
    it. So call `version.check_open` before other reads, and after each one.

    Args:
      opened: the file; it may be closed afterwards.

    Attributes:
      version: of the file that is mapped.
      bytes: read-only; arrays may be views of it.
    """

    def __init__(self, opened: BinaryIO) -> None:
        self.version = FileVersion.of_open(opened.fileno())
        if self.version.size_bytes == 0:
            self.bytes: mmap.mmap | bytes = b""  # nothing can be mapped
        else:
            self.bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, header: Header, offset: int) -> npt.NDArray[Any]:
        """The array of a `.npy` that begins at byte `offset`: a view."""
        return np.ndarray(header.shape, header.dtype, self.bytes, offset + header.start, order=header.order)


def file_at(address: int) -> str | None:
    """The file that is mapped at an address; None if there is none, or the system does not tell."""
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            for line in maps:
                begin, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
                if begin <= address < end:
                    return line[line.index("/") :].rstrip("\n") if "/" in line else None
    except OSError:
        pass
    return None
