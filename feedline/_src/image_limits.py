"""Limits of what an image may ask of its decoder, checked on the encoded bytes before any memory is taken.

A decoder allocates what a header promises, and a header of 35 bytes may promise gigabytes. So only formats whose
size is found here are decoded. OpenCV reads others, too, which are refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

MOST_PIXELS = 1 << 28
_MOST_SCANS = 64
"""Of a JPEG: encoders write 10 to 20, scripts of jpegtran some dozens. Each passes over the whole image."""
JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_SCAN = b"\xff\xda"
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])", re.DOTALL)  # with a length after it; or the end of the image
_END_OF_IMAGE = b"\xd9"
_PNM = re.compile(rb"P[1-6](?:\s|#[^\r\n]*\r?\n)+(\d+)(?:\s|#[^\r\n]*\r?\n)+(\d+)")
_TIFF_SIZES = (256, 257, 322, 323)  # width and height of the image, and of a tile
_TIFF_INTEGERS = {3: "H", 4: "I"}


def check_pixels(height: int, width: int) -> None:
    """Refuse an image of more than `MOST_PIXELS`. ValueError says what its header promises."""
    if height * width > MOST_PIXELS:
        raise ValueError(
            f"an image may have {MOST_PIXELS:,} pixels, and this one's header says {height} × {width}; shrink it"
        )


def check_scans(jpeg: bytes) -> None:
    """Refuse a JPEG of so many scans that it would hold a thread for minutes, with a ValueError."""
    if jpeg.count(_SCAN) > _MOST_SCANS and _has_many_scans(jpeg):  # other data may hold these bytes, too
        raise ValueError(
            f"a JPEG may have {_MOST_SCANS} scans, each of which takes a pass over the image, and this one has "
            "more; write it again with one: jpegtran -optimize image.jpg > smaller.jpg"
        )


def check_image(data: bytes) -> None:
    """Refuse an image of more than `MOST_PIXELS`. Of a JPEG, whose size simplejpeg reads, refuse too many scans.

    Raises:
      ValueError: it is that, or has a damaged header or another format.
    """
    for begins, check in _CHECKS.items():
        if data.startswith(begins):
            try:
                check(data)
            except struct.error as error:
                raise not_an_image(data) from error
            return
    if data[4:8] != b"ftyp":  # AVIF, which libavif limits to as many pixels
        raise not_an_image(data)


def not_an_image(data: bytes) -> ValueError:
    """The error for what cannot be decoded."""
    return ValueError(
        "an image must be a whole JPEG, PNG, WebP, AVIF, GIF, BMP, TIFF or PNM, and this one begins with "
        f"{bytes(data[:16])!r} and has {len(data)} bytes; write the file again, in one of these formats, or leave "
        "it out"
    )


def _has_many_scans(jpeg: bytes) -> bool:
    scans, at = 0, len(JPEG) - 1
    while scans <= _MOST_SCANS and (marker := _MARKER.search(jpeg, at)) and marker[1] != _END_OF_IMAGE:
        scans += marker[0] == _SCAN
        at = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big")
    return scans > _MOST_SCANS


def _check_png(data: bytes) -> None:
    """Also refuse chunks for which OpenCV would allocate more memory than they need."""
    width, height = struct.unpack_from(">II", data, 16)
    check_pixels(height, width)
    at = len(_PNG)
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if length > len(data):
            raise ValueError(
                f"chunks of a PNG must lie within its {len(data)} bytes, and the one at byte {at} has {length}; "
                "write the file again, or leave it out"
            )
        at += 12 + length  # length, kind and checksum


def _check_webp(data: bytes) -> None:
    """A single image has at most 2^28 pixels by its format. The canvas of an animation has up to 2^32."""
    if data[12:16] == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        check_pixels(height, width)


def _check_gif(data: bytes) -> None:
    width, height = struct.unpack_from("<HH", data, 6)
    check_pixels(height, width)


def _check_bmp(data: bytes) -> None:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)
    check_pixels(abs(height), abs(width))  # rows of a negative height go from top to bottom


def _check_tiff(data: bytes) -> None:
    """Of the first image, the only one that is decoded."""
    order = "<" if data.startswith(b"II") else ">"
    (at,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, at)
    found: dict[int, int] = dict.fromkeys(_TIFF_SIZES, 0)
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, values = struct.unpack_from(order + "HHI", data, entry)
        if tag in found:
            if kind not in _TIFF_INTEGERS or values != 1:
                raise ValueError(
                    f"sizes of a TIFF must be one SHORT or LONG, and tag {tag} has {values} of type {kind}; write "
                    "it again, or leave it out"
                )
            (value,) = struct.unpack_from(order + _TIFF_INTEGERS[kind], data, entry + 8)
            found[tag] = max(found[tag], value)  # of a tag that comes twice, libtiff takes one of both
    width, height, tile_width, tile_height = found.values()
    check_pixels(height, width)
    check_pixels(tile_height, tile_width)


def _check_pnm(data: bytes) -> None:
    size = _PNM.match(data)
    if size is None:
        raise ValueError("a PNM must begin with its width and height, and this one does not; write it again")
    check_pixels(int(size[2]), int(size[1]))


_CHECKS: dict[bytes, Callable[[bytes], None]] = {
    JPEG: check_scans,
    _PNG: _check_png,
    b"RIFF": _check_webp,
    b"GIF8": _check_gif,
    b"BM": _check_bmp,
    b"II*\0": _check_tiff,
    b"MM\0*": _check_tiff,
    **dict.fromkeys((b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"), _check_pnm),
}
"""By the first bytes of a format, as OpenCV knows it by them."""
