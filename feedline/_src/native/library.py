"""The compiled library, if there is one."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

INTERFACE = 5
"""The version of the C functions and structs that this package calls; `columns.c` has the same number."""

PATH = Path(__file__).with_name(f"libcolumns.so.{INTERFACE}")
"""Where the build puts the library."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library; None if it was not built, or with FEEDLINE_PURE_PYTHON=1: then NumPy is used.

    Raises:
      ImportError: it cannot be loaded, or has another interface.
    """
    if os.environ.get("FEEDLINE_PURE_PYTHON", "0") not in ("", "0") or not PATH.exists():
        return None
    try:
        loaded = ctypes.CDLL(str(PATH))
        found = int(loaded.feedline_interface())
    except (OSError, AttributeError) as error:
        raise ImportError(f"{PATH} cannot be loaded ({error}); {_INSTALL}") from error
    if found != INTERFACE:
        raise ImportError(
            f"{PATH} has interface {found}, and this package calls interface {INTERFACE}; {_INSTALL}"
        )
    loaded.feedline_name_lost_files()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.feedline_order.argtypes = (pointer, pointer, number, number, pointer, pointer)
    loaded.feedline_gather.argtypes = (pointer, pointer, number, pointer)
    loaded.feedline_fill.argtypes = (pointer, pointer, number, number, pointer, pointer, number, pointer)
    loaded.feedline_permute.argtypes = (pointer, pointer, pointer, pointer, number)
    loaded.feedline_spans.argtypes = (pointer, pointer, pointer, number, number, number, pointer)
    loaded.feedline_mark.argtypes = (pointer, number, pointer, number, pointer, number)
    return loaded


_INSTALL = "install feedline again, or set FEEDLINE_PURE_PYTHON=1 to do without it"


def implementation() -> str:
    """What computes the order and gathers columns in this process: "C" or "NumPy"."""
    return "NumPy" if library() is None else "C"
