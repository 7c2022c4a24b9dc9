"""`MappedObject`: all bytes of an object as one range of memory, into which its cache files are mapped."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from feedline._src.files.cache import touch
from feedline._src.files.cached_range import CachedRange
from feedline._src.files.file import Bytes, Version

_MAP_FIXED, _PROT_NONE = 0x10, 0  # on Linux and macOS; Python's mmap does not define them
_CHECKED = 16  # the most files that one read checks, by a system call for each
_FAILED = ctypes.c_void_p(-1).value


class MappedObject:
    """All bytes of an object, read-only. They stay mapped for as long as an array refers to them.

    Args:
      files: path and version of each mapped file of the cache.
    """

    def __init__(self, memory: Bytes, files: Sequence[tuple[str, Version]]) -> None:
        self.memory, self._files = memory, files
        self._turn = itertools.count()

    @classmethod
    def of(cls, pieces: Sequence[CachedRange]) -> MappedObject | None:
        """Map adjacent ranges. None if the cache lacks some bytes, or if no addresses or mappings are left."""
        size = sum(piece.size for piece in pieces)
        if size == 0:
            return cls(np.zeros(0, np.uint8), [])
        libc, files = _libc(), []
        address = libc.mmap(None, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address == _FAILED:
            return None
        raw = (ctypes.c_char * size).from_address(address)
        weakref.finalize(raw, libc.munmap, address, size).atexit = False
        for piece in pieces:
            file, flags = piece.find(), mmap.MAP_SHARED | _MAP_FIXED
            if file is None or not file.verified.all():
                return None
            files.append((file.path, Version.of(file.descriptor)))
            if libc.mmap(address, file.size, mmap.PROT_READ, flags, file.descriptor, 0) == _FAILED:
                return None
            if not file.is_intact:
                return None
            address += file.size
        return cls(np.frombuffer(memoryview(raw).toreadonly(), np.uint8), files)

    def is_current(self) -> bool:
        """Whether no mapped file was deleted or written to. If there are over 16, each call checks the next 16."""
        count = len(self._files)
        with contextlib.suppress(FileNotFoundError):
            some = (self._files[next(self._turn) % count] for _ in range(min(count, _CHECKED)))
            return all(touch(path) == version for path, version in some)
        return False


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    number, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, size)
    return libc
