"""A part of a JPEG, decoded by libjpeg-turbo and `jpeg.c` without the rest of the image."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

INTERFACE = 1
"""The version of the C functions and structs that this module calls; `jpeg.c` has the same number."""

PATH = Path(__file__).with_name(f"libjpegpart.so.{INTERFACE}")
"""Where the build puts the library."""

FUNCTIONS = (
    "jpeg_std_error",
    "jpeg_CreateDecompress",
    "jpeg_mem_src",
    "jpeg_read_header",
    "jpeg_has_multiple_scans",
    "jpeg_start_decompress",
    "jpeg_crop_scanline",
    "jpeg_skip_scanlines",
    "jpeg_read_scanlines",
    "jpeg_destroy_decompress",
)
"""Of libjpeg-turbo, in the order of the struct `Libjpeg` in `jpeg.c`."""

_MARGIN = 48
"""MARGIN of `jpeg.c`: how many pixels a row has beside those of the part."""
_KEPT_BYTES = 32 << 20
"""The most memory that a thread keeps for its next image."""
_ODD_SIZE = 8
"""An image less high and wide than this may have the same size at two scales, and simplejpeg takes the smaller."""

Image = npt.NDArray[np.uint8]


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class _Part(ctypes.Structure):
    _fields_ = [
        ("eighths", ctypes.c_uint32),
        ("top", ctypes.c_uint32),
        ("left", ctypes.c_uint32),
        ("height", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("out", ctypes.c_void_p),
    ]


class _Memory(threading.local):
    """A thread's memory for pixels."""

    def __init__(self) -> None:
        self.pixels = np.empty(0, np.uint8)

    def pixels_of(self, size: int) -> Image:
        if size <= self.pixels.size:
            return self.pixels[:size]
        memory = np.empty(size, np.uint8)
        if size <= _KEPT_BYTES:
            self.pixels = memory
        return memory


class PartDecoder:
    """Decodes a part of a JPEG to the pixels that simplejpeg decodes there, bit for bit. Any thread may call it.

    What comes after the part is not read: damage there, which simplejpeg would refuse, is not noticed.

    Args:
      library: `jpeg.c`, compiled.
      libjpeg: libjpeg-turbo with the interface of version 6b. Its functions must have the names in `FUNCTIONS`.

    Raises:
      AttributeError: a library lacks a function.
    """

    def __init__(self, library: ctypes.CDLL, libjpeg: ctypes.CDLL) -> None:
        addresses = [ctypes.cast(getattr(libjpeg, name), ctypes.c_void_p).value for name in FUNCTIONS]
        self._libraries = (library, libjpeg)
        self._functions = (ctypes.c_void_p * len(FUNCTIONS))(*addresses)
        pointer = ctypes.c_void_p
        library.feedline_jpeg_part.argtypes = (pointer, pointer, ctypes.c_size_t, pointer)
        self._decode = library.feedline_jpeg_part
        self._memory = _Memory()

    def part(self, data: bytes, size: tuple[int, int], shrink: int, box: Box) -> Image | None:
        """RGB pixels of a part of the image, in memory that the thread's next call overwrites.

        Args:
          data: the JPEG.
          size: its height and width, as its header says.
          shrink: 1, 2, 4 or 8: how many times smaller it is decoded.
          box: the part at that scale.

        Returns:
          uint8[box.height, box.width, 3]; None: simplejpeg must decode it, because it is damaged or unusual.
        """
        if max(size) < _ODD_SIZE:
            return None
        width = box.width + _MARGIN
        pixels = self._memory.pixels_of(box.height * width * 3)
        encoded = np.frombuffer(data, np.uint8)
        part = _Part(8 // shrink, *box, 0, _address(pixels))
        if self._decode(self._functions, _address(encoded), len(encoded), ctypes.byref(part)):
            return None
        first = box.left - part.first
        return pixels.reshape(box.height, width, 3)[:, first : first + box.width]


def _address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


@functools.cache
def part_decoder() -> PartDecoder | None:
    """The decoder of this process; None where one of its libraries is missing, or with FEEDLINE_PURE_PYTHON=1.

    Raises:
      ImportError: `jpeg.c` was compiled, but cannot be loaded or has another interface.
    """
    if os.environ.get("FEEDLINE_PURE_PYTHON", "0") not in ("", "0") or not PATH.exists():
        return None
    try:
        library = ctypes.CDLL(str(PATH))
        found = int(library.feedline_jpeg_interface())
    except (OSError, AttributeError) as error:
        raise ImportError(f"{PATH} cannot be loaded ({error}); {_INSTALL}") from error
    if found != INTERFACE:
        raise ImportError(
            f"{PATH} has interface {found}, and this package calls interface {INTERFACE}; {_INSTALL}"
        )
    for name in _libjpegs():
        with contextlib.suppress(OSError, AttributeError):
            decoder = PartDecoder(library, ctypes.CDLL(name))
            if _is_right(decoder):
                return decoder
    return None


_INSTALL = "install feedline again, or set FEEDLINE_PURE_PYTHON=1 to do without it"


def _libjpegs() -> Iterator[str]:
    """Where libjpeg-turbo may be: in the wheels of Pillow for Linux and macOS, and in the system."""
    pillow = importlib.util.find_spec("PIL")
    if pillow is not None and pillow.origin is not None:
        package = Path(pillow.origin).parent
        yield from map(str, sorted(package.parent.glob("pillow.libs/libjpeg*.so.62*")))
        yield from map(str, sorted(package.glob(".dylibs/libjpeg.62*.dylib")))
    yield "libjpeg.so.62"


def _is_right(decoder: PartDecoder) -> bool:
    """Whether parts of an image have the pixels of simplejpeg: distributions may build another libjpeg."""
    simplejpeg = importlib.import_module("simplejpeg")  # which read the header, so it is installed
    down, right, colour = np.ogrid[:90, :120, :3]
    image = ((down * down + 7 * right * (colour + 1)) % 256).astype(np.uint8)
    for sampling, shrink in itertools.product(("420", "422", "440", "411", "444"), (1, 2, 4, 8)):
        data = simplejpeg.encode_jpeg(image, quality=90, colorsubsampling=sampling)
        height, width = -(-90 // shrink), -(-120 // shrink)
        whole = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
        box = Box(height // 3, width // 3, height // 2, width // 2)
        part = decoder.part(data, (90, 120), shrink, box)
        if part is None or not (part == whole[box.top :, box.left :][: box.height, : box.width]).all():
            return False
    return True
