"""A range of addresses as large as an object, into which the blocks that are there are mapped."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from typing import Any

_MAP_FIXED, _PROT_NONE = 0x10, 0  # of Linux and macOS; Python's mmap does not have them
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _mapped(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc().mmap(address, size, protection, flags, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


class AddressSpace:
    """`size` bytes of addresses. What is not mapped must not be read: that ends the process (SIGSEGV).

    So a library must never be given `bytes`; only code that knows which bytes are there.

    Attributes:
      bytes: all of them, read-only. NumPy arrays may be views, which keep the addresses.
      address: of the first; 0 if there is none.

    Args:
      size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        if size == 0:
            self.bytes = memoryview(b"")
            self.address = 0
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = _mapped(None, size, _PROT_NONE, flags, -1)
        raw = (ctypes.c_char * size).from_address(self.address)
        weakref.finalize(raw, _libc().munmap, self.address, size).atexit = False
        self.bytes = memoryview(raw).cast("B").toreadonly()

    def map(self, start: int, length: int, descriptor: int) -> None:
        """Make the first `length` bytes of a file those from `start` on, a multiple of the page size."""
        try:
            _mapped(self.address + start, length, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise OSError(
                error.errno,
                "each block that is read is mapped into memory, and this process has as many mappings as Linux "
                "allows; read smaller batches, or raise vm.max_map_count (sysctl)",
            ) from error

    def unmap(self, start: int, length: int) -> None:
        """Let go of the file. These bytes must not be read any more."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _mapped(self.address + start, length, _PROT_NONE, flags, -1)
