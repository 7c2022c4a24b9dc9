"""The compiled library, if there is one, and its errors."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from feedline._src.errors import FeedError, RowError, warn

INTERFACE = 6
"""The version of the C functions and structs that this package calls; `columns.c` has the same number."""

PATH = Path(__file__).with_name(f"libcolumns.so.{INTERFACE}")
"""The path to which the build writes the library."""

_INSTALL = "install feedline again, or set FEEDLINE_PURE_PYTHON=1 to do without it"
_MEMORY_LOST = 4  # a code of columns.c


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the library. None if it was not built, does not load, or FEEDLINE_PURE_PYTHON=1 is set: NumPy is used.

    Raises:
      ImportError: the library has another interface.
    """
    if os.environ.get("FEEDLINE_PURE_PYTHON", "0") not in ("", "0") or not PATH.exists():
        return None
    try:
        loaded = ctypes.CDLL(str(PATH))
        found = int(loaded.feedline_interface())
    except (OSError, AttributeError) as error:
        warn(f"{PATH} cannot be loaded ({error}), so feedline computes with NumPy, slower; {_INSTALL}")
        return None
    if found != INTERFACE:
        raise ImportError(f"{PATH} has interface {found}, and this package calls {INTERFACE}; {_INSTALL}")
    loaded.feedline_name_lost_files()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.feedline_gather.argtypes = (pointer, pointer, number, pointer)
    loaded.feedline_fill.argtypes = (pointer, pointer, number, number, pointer, pointer, number, pointer)
    loaded.feedline_permute.argtypes = (pointer, pointer, pointer, pointer, number)
    loaded.feedline_spans.argtypes = (pointer, pointer, pointer, number, number, number, pointer)
    loaded.feedline_mark.argtypes = (pointer, number, pointer, number, pointer, number)
    loaded.feedline_read.argtypes = (ctypes.c_int32, pointer, pointer, number, number, pointer)
    loaded.feedline_read.restype = number
    return loaded


def implementation() -> str:
    """What computes the order and gathers columns in this process: "C" or "NumPy"."""
    return "NumPy" if library() is None else "C"


class Bad(ctypes.Array[ctypes.c_int64]):
    """Details of a C function's error: [0] a bad position, row or span; [1] the address of lost memory."""

    _type_, _length_ = ctypes.c_int64, 2

    def check_memory(self, code: int) -> None:
        """If a C function could not access memory, raise an error that names the file and, if known, the row.

        Raises:
          RowError: a mapped file was truncated, or its disk failed.
          FeedError: it is not known which row was lost, or the lost memory is the batch's own.
        """
        if code != _MEMORY_LOST:
            return
        file = file_at(ctypes.c_uint64(self[1]).value)
        if self[0] < 0:
            raise FeedError(
                "the memory of a batch could not be written, or its rows could not be read (SIGBUS): no room is "
                "left for this memory, or a disk failed; look at the log of the kernel (dmesg)",
                stage="read",
                file=file,
            )
        raise RowError(
            "a row could not be read from its mapped file (SIGBUS): the file was truncated, or its disk failed; "
            "restore the file, or look at the log of the kernel (dmesg)",
            stage="read",
            row=self[0],
            file=file,
        )


def file_at(address: int) -> str | None:
    """The file that is mapped at an address; None if no file is, or the system has no /proc/self/maps."""
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            for line in maps:
                begin, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
                if begin <= address < end:
                    return line[line.index("/") :].rstrip("\n") if "/" in line else None
    except OSError:
        pass
    return None
