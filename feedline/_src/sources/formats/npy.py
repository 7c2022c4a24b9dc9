"""Parser of `.npy` headers, which validates all that a header says."""

from __future__ import annotations

import ast
import contextlib
import math
import re
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MAGIC = b"\x93NUMPY"
_ENCODINGS = {(1, 0): "latin1", (2, 0): "latin1", (3, 0): "utf8"}
MOST_HEADER_BYTES = 10_000
"""NumPy's limit: Python's parser is not safe for long untrusted texts."""
_NAMES = {"descr", "fortran_order", "shape"}
_AST = threading.RLock()
"""In Python 3.11, threads that use `ast` at the same time may get a SystemError (CPython issue 106905)."""
_ATTEMPTS = 9
"""Other modules use `ast` too."""


class Header(NamedTuple):
    """The header of a `.npy`.

    Attributes:
      shape, dtype: of the array.
      fortran: elements are in Fortran order, else in C order.
      start: the size of the header in bytes, after which the elements follow.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int

    @property
    def order(self) -> Literal["C", "F"]:
        """The order of the elements, in NumPy's notation."""
        return "F" if self.fortran else "C"


def read_header(read: Callable[[int], bytes], size: int) -> Header:
    """The header of a `.npy` of `size` bytes, whose next bytes come from `read`.

    Raises:
      ValueError: it is not a valid header, or describes more elements than fit into that many bytes.

    Example:
      >>> import io
      >>> file = io.BytesIO()
      >>> np.save(file, np.zeros((2, 3), np.int16))
      >>> file.seek(0)
      0
      >>> read_header(file.read, 140)
      Header(shape=(2, 3), dtype=dtype('int16'), fortran=False, start=128)
    """
    first = read(len(_MAGIC) + 2)
    if first[:-2] != _MAGIC:
        raise ValueError("it does not begin as a .npy does")
    version = (first[-2], first[-1])
    if version not in _ENCODINGS:
        raise ValueError(f"its format version must be 1.0, 2.0 or 3.0, got {version[0]}.{version[1]}")
    prefix = 2 if version == (1, 0) else 4
    length = int.from_bytes(read(prefix), "little")
    start = len(first) + prefix + length
    if start > MOST_HEADER_BYTES or start > size:
        raise ValueError(
            f"its header must have at most {MOST_HEADER_BYTES} bytes and end in the file, got {length} bytes"
        )
    found = _literal(read(length).decode(_ENCODINGS[version]))
    if not isinstance(found, dict) or found.keys() != _NAMES:
        raise ValueError(f"its header must be a dict of {', '.join(sorted(_NAMES))}, got {found!r:.200}")
    shape = found["shape"]
    if not isinstance(shape, tuple) or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise ValueError(f"its shape must be a tuple of lengths, got {shape!r:.200}")
    if not isinstance(found["fortran_order"], bool):
        raise ValueError(f"fortran_order must be True or False, got {found['fortran_order']!r:.200}")
    dtype = _dtype(found["descr"])
    needed = start + math.prod(shape) * dtype.itemsize
    if needed > size:
        raise ValueError(f"its header promises {needed} bytes, but there are {size}")
    return Header(shape, dtype, found["fortran_order"], start)


def _literal(text: str) -> Any:
    try:
        return _evaluated(text)
    except Exception as error:  # of many types, for arbitrary text
        written = re.sub(r"(?<=\d)L(?=[,)])", "", text)  # (10L,) is how Python 2 wrote some lengths
        if written != text:
            return _literal(written)
        raise ValueError(f"its header is no Python literal ({type(error).__name__}: {error})") from error


def _evaluated(text: str) -> Any:
    with _AST:
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(SystemError):
                return ast.literal_eval(text)
        return ast.literal_eval(text)


def _dtype(described: Any) -> np.dtype[Any]:
    try:
        dtype = np.lib.format.descr_to_dtype(described)
    except Exception as error:  # of many types, as above
        raise ValueError(f"its dtype {described!r:.200} is none that NumPy knows ({error})") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects (dtype object), which cannot be mapped or placed")
    if dtype.itemsize == 0:
        raise ValueError(f"its elements must have bytes, and those of dtype {described!r:.200} have none")
    return dtype
