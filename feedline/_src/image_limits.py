"""Refuses encoded images that would take too much memory or time to decode.

A decoder allocates what a header promises, and a header of 35 bytes may promise gigabytes. So an image is decoded
only if its size is found here. OpenCV could read further formats, but they are refused.
"""

from __future__ import annotations

import re
import struct

import numpy as np

MOST_PIXELS = 1 << 28
_MOST_SCANS = 64  # of a JPEG: encoders write 10 to 20. Each scan passes over the whole image
JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_SCAN, _END_OF_IMAGE = b"\xda", b"\xd9"
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])", re.DOTALL)  # markers with a length, and the image's end
_PNM = re.compile(rb"P([1-6])" + 2 * (rb"(?:\s|#[^\r\n]*\r?\n)+(\d+)") + rb"(?:(?:\s|#[^\r\n]*\r?\n)+(\d+))?")
_TIFF_SIZES = (256, 257, 322, 323)  # width and height of the image, and of a tile
_TIFF_INTEGERS = {3: "H", 4: "I"}


def check_pixels(height: int, width: int) -> None:
    """Refuse an image of more than `MOST_PIXELS`."""
    if height * width > MOST_PIXELS:
        raise ValueError(
            f"an image may have at most {MOST_PIXELS:,} pixels, but this header says {height} × {width}; shrink it"
        )


def check_scans(jpeg: bytes) -> None:
    """Refuse a JPEG whose many scans would take minutes to decode."""
    values = np.frombuffer(jpeg, np.uint8)  # NumPy counts three times as fast as `bytes.count`, without the GIL
    if np.count_nonzero((values[:-1] == 0xFF) & (values[1:] == _SCAN[0])) <= _MOST_SCANS:
        return
    scans, at = 0, len(JPEG) - 1  # count only markers, since their bytes may occur in other data, too
    while scans <= _MOST_SCANS and (marker := _MARKER.search(jpeg, at)) and marker[1] != _END_OF_IMAGE:
        scans += marker[1] == _SCAN
        at = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big")
    if scans > _MOST_SCANS:
        raise ValueError(
            f"a JPEG may have at most {_MOST_SCANS} scans, since each passes over the whole image, and this one "
            "has more; write it again with one scan: jpegtran -optimize image.jpg > smaller.jpg"
        )


def check_image(data: bytes) -> None:
    """Refuse unknown formats, images with too many pixels, and JPEGs with too many scans."""
    try:
        if data.startswith(JPEG):
            check_scans(data)  # the caller checks the size, which simplejpeg reads
        elif not (data.startswith(b"\0") and data[4:8] == b"ftyp"):  # not AVIF: libavif has this limit itself
            check_pixels(*_size(data))
    except struct.error as error:
        raise not_an_image(data) from error


def not_an_image(data: bytes) -> ValueError:
    """The error for data that cannot be decoded."""
    return ValueError(
        "an image must be a whole JPEG, PNG, WebP, AVIF, GIF, BMP, TIFF or PNM, and this one begins with "
        f"{bytes(data[:16])!r} and has {len(data)} bytes; write the file again, in one of these formats, or leave "
        "it out"
    )


def _size(data: bytes) -> tuple[int, int]:
    """Height and width in the header of any format except JPEG and AVIF."""
    if data.startswith(_PNG):
        width, height = struct.unpack_from(">II", data, 16)
        _check_chunks(data)
    elif data.startswith(b"RIFF"):
        # a still WebP has at most 2^28 pixels by its format; the canvas of an animation has up to 2^32
        animated = data[12:16] == b"VP8X"
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 if animated else 1 for at in (24, 27))
    elif data.startswith(b"GIF8"):
        width, height = struct.unpack_from("<HH", data, 6)
    elif data.startswith(b"BM"):
        (header_bytes,) = struct.unpack_from("<I", data, 14)
        width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)
    elif data.startswith((b"II*\0", b"MM\0*")):
        return _size_of_tiff(data, "<" if data.startswith(b"II") else ">")
    elif found := _PNM.match(data):
        kind, width, height = map(int, found.groups()[:3])
        largest = int((found[4] or b"0")[:9])  # in a bitmap, group 4 contains pixels, perhaps as one long number
        if kind not in (1, 4) and largest not in (255, 65535):  # OpenCV would not scale the values
            raise ValueError(f"the largest value of a PNM must be 255 or 65535, got {largest}; write it again")
    else:
        raise not_an_image(data)
    return abs(height), abs(width)  # rows of a BMP with a negative height go from top to bottom


def _check_chunks(png: bytes) -> None:
    """Refuse chunks that claim more bytes than the file has: OpenCV would allocate these bytes."""
    at = len(_PNG)
    while at + 8 <= len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if length > len(png):
            raise ValueError(
                f"chunks of a PNG must lie within its {len(png)} bytes, and the one at byte {at} has {length}; "
                "write the file again, or leave it out"
            )
        at += 12 + length  # length, kind and checksum


def _size_of_tiff(data: bytes, order: str) -> tuple[int, int]:
    """Height and width of the first image, the only one that is decoded; or of its tiles, if they are larger."""
    (at,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, at)
    found: dict[int, int] = dict.fromkeys(_TIFF_SIZES, 0)
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, values = struct.unpack_from(order + "HHI", data, entry)
        if tag in found:
            if kind not in _TIFF_INTEGERS or values != 1:
                raise ValueError(
                    f"each size in a TIFF must be one SHORT or LONG, and tag {tag} has {values} of type {kind}; "
                    "write the file again, or leave it out"
                )
            (value,) = struct.unpack_from(order + _TIFF_INTEGERS[kind], data, entry + 8)
            found[tag] = max(found[tag], value)  # if a tag occurs twice, libtiff may use either
    width, height, tile_width, tile_height = found.values()
    return max((height, width), (tile_height, tile_width), key=lambda size: size[0] * size[1])
