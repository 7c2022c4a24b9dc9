"""Images as rows: JPEG, PNG, WebP and others, cropped and resized.

`pip install '.[images]'` in the clone of the repository installs the libraries.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.formats.registry import require
from feedline._src.image_limits import JPEG, check_image, check_pixels, check_scans, not_an_image
from feedline._src.options import checked_integer
from feedline._src.rows.source import EncodedSource, RowSource
from feedline._src.sources.decoded import Row, decoded
from feedline._src.sources.open_source import open_source

Crop = Literal["center", "random"]
Image = npt.NDArray[np.uint8]
_IMAGE_FIELDS = ("image", "file", "jpg", "jpeg", "png", "webp", "bytes")
_LABEL_FIELDS = ("label", "cls")
_DIGITS = re.compile(r"(0|-?[1-9][0-9]*)\r?\n?")
_TRIES = 10  # if this many random crops do not fit, a centred one is used
_UINT64 = (1 << 64) - 1


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def decode(
    source: EncodedSource | str | os.PathLike[str],
    size: int = 224,
    crop: Crop = "center",
    flip: bool = False,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    orient: bool = False,
    image: str | None = None,
    label: str | None = None,
) -> RowSource:
    """Decode images into rows {"image": uint8[size, size, 3], "label": int32}, in RGB; "label" is optional.

    Reading threads decode the images, JPEGs only as large as needed, and write them into the batch. Grey and CMYK
    images become RGB, and transparency is dropped. A damaged image is a bad row: see `Reading.bad_rows`.
    Convert to floats in the training step, not before: `batch["image"].astype(jnp.bfloat16) / 255`.

    Args:
      source: what `open_source` returns for encoded records, or the path of such records: a folder of class
        folders, tar or TFRecord shards, or other files that docs/images.md lists.
      size: height and width in pixels.
      crop: "center": the largest square in the middle. "random", for training: a rectangle of random size, shape
        and place, different in each epoch; a function of (seed, epoch, position).
      flip: mirror half of the images, at random.
      scale: the least and the greatest area of a random crop, as a share of the image.
      ratio: the least and the greatest width ÷ height of a random crop.
      orient: turn an image as its EXIF data says. JPEGs are then decoded at full size, which takes longer.
      image: the field of a record that holds the image; None: the first of "image", "file", "jpg", "jpeg", "png",
        "webp", "bytes" that exists.
      label: the field that holds the class: an integer, or text such as "7"; a row with any other label is a bad
        row. None: "label" or "cls", if there is one.

    Raises:
      ImportError: simplejpeg or OpenCV is not installed.
      ValueError: an option is invalid, or the records lack the field.
      RowError: none of the first, the middle and the last image can be decoded.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> import simplejpeg
      >>> folder = Path(tempfile.mkdtemp())
      >>> for name in ("cat", "dog"):
      ...     (folder / name).mkdir()
      ...     photo = simplejpeg.encode_jpeg(np.full((80, 60, 3), 200, np.uint8))
      ...     _ = (folder / name / "1.jpg").write_bytes(photo)
      >>> source = decode(folder, size=32)
      >>> source.spec
      {'image': ShapeDtypeStruct(shape=(32, 32, 3), dtype=uint8), 'label': ShapeDtypeStruct(shape=(), dtype=int32)}
      >>> source[1]["image"].mean(), source[1]["label"]
      (np.float64(200.0), np.int32(1))
    """
    checked_integer("size", size, at_least=1, at_most=1 << 15)
    if crop not in ("center", "random"):
        raise ValueError(f'crop must be "center" or "random", got {crop!r}')
    scale, ratio = _checked_range("scale", scale, most=1.0), _checked_range("ratio", ratio, most=math.inf)
    opened: Any = open_source(source) if isinstance(source, str | os.PathLike) else source
    fields = opened.fields if isinstance(opened, EncodedSource) else None
    if fields is not None:
        image = _field("image", image, fields, _IMAGE_FIELDS)
        if label is not None or set(fields) & set(_LABEL_FIELDS):
            label = _field("label", label, fields, _LABEL_FIELDS)
    elif image is not None or label is not None:
        raise ValueError(
            f"records of plain bytes have no fields, got image={image!r}, label={label!r}; leave them out"
        )
    decoder = ImageDecoder(size, crop, flip, scale, ratio, orient, image, label)
    spec = {"image": jax.ShapeDtypeStruct((size, size, 3), np.uint8)}
    if label is not None:
        spec["label"] = jax.ShapeDtypeStruct((), np.int32)
    return decoded(opened, decoder, spec)


def _checked_range(name: str, value: Sequence[float], most: float) -> tuple[float, float]:
    try:
        least, greatest = map(float, value)
    except (TypeError, ValueError):
        least, greatest = math.nan, math.nan
    if not 0 < least <= greatest <= most or greatest == math.inf:
        limit = "finite and above 0" if most == math.inf else f"above 0 and at most {most:g}"
        raise ValueError(f"{name} must be (least, greatest), {limit}, got {value!r}")
    return least, greatest


def _field(kind: str, given: str | None, fields: Sequence[str], usual: Sequence[str]) -> str:
    wanted = usual if given is None else [given]
    for name in wanted:
        if name in fields:
            return name
    raise ValueError(
        f"a record must have the field of the {kind}, {' or '.join(map(repr, wanted))}, and has "
        f"{', '.join(fields)}; give {kind}=..."
    )


@dataclasses.dataclass(frozen=True)
class ImageDecoder:
    """Decodes a record into {"image", "label"}. The attributes are the arguments of `decode`."""

    size: int
    crop: Crop
    flip: bool
    scale: tuple[float, float]
    ratio: tuple[float, float]
    orient: bool
    image: str | None
    label: str | None

    def __call__(self, record: Any, out: Mapping[str, Any], row: Row) -> None:
        """Write the image, and the label, of one record."""
        data = record if self.image is None else record[self.image]
        if not data:
            raise ValueError("an image must not be empty, and this one has 0 bytes; write the file again")
        mirror = self.flip and uniform(row.key, 4 * _TRIES + 1) < 0.5  # crops use smaller indices
        _resize_into(out["image"], self._cropped(data, row.key), mirror)
        if self.label is not None:
            out["label"][...] = _exact_label(record[self.label])

    def _cropped(self, data: bytes, key: int) -> Image:
        """The crop before it is resized. A JPEG may be decoded at a lower resolution."""
        header = _jpeg_header(data)
        if header is None or self.orient:
            whole = _decoded_by_opencv(data, self.orient)
            height, width = whole.shape[:2]
            return _part(whole, self.box(height, width, key))
        box = self.box(*header, key)
        # libjpeg-turbo can shrink to other eighths, but without SIMD: 7/8, 6/8 and 5/8 take longer than full size
        times = min(box.height, box.width) // self.size
        shrink = next(factor for factor in (8, 4, 2, 1) if factor <= max(1, times))
        small = math.ceil(header[0] / shrink), math.ceil(header[1] / shrink)
        check_scans(data)
        whole = require("simplejpeg", "images").decode_jpeg(data, min_height=small[0], min_width=small[1])
        return _part(whole, _scaled(box, header, small))

    def box(self, height: int, width: int, key: int) -> Box:
        """The box that is cropped from an image of this size."""
        for attempt in range(_TRIES if self.crop == "random" else 0):
            area, shape, down, right = (uniform(key, 4 * attempt + i) for i in range(1, 5))
            area = height * width * _between(self.scale, area)
            shape = math.exp(_between((math.log(self.ratio[0]), math.log(self.ratio[1])), shape))
            tall, wide = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if 0 < tall <= height and 0 < wide <= width:
                return Box(int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide)
        low, high = self.ratio if self.crop == "random" else (1.0, 1.0)
        wide = min(width, max(1, round(height * high)))
        tall = min(height, max(1, round(wide / low)))
        return Box((height - tall) // 2, (width - wide) // 2, tall, wide)


def _exact_label(value: Any) -> int:
    """The integer in a field, never rounded. Text must be as `str(int)` writes it; a line break may follow."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    if isinstance(text, str):
        exact = _DIGITS.fullmatch(text) is not None
    else:
        number = np.asarray(value)
        exact = number.ndim == 0 and number.dtype.kind in "biuf" and float(number).is_integer()
    if not exact:
        raise ValueError(
            f"a label must be an integer, or its digits without spaces or leading zeros, and this one is "
            f"{value!r:.80}; write the number of the class, or name another field with label=..."
        )
    return int(text)


def uniform(key: int, index: int) -> float:
    """Random number `index` of a key, uniform in [0, 1): SplitMix64 (Steele, Lea and Flood 2014).

    It is the same on any machine and with any version. Making a NumPy generator would take longer than making
    all numbers that an image needs.
    """
    mixed = (key + index * 0x9E3779B97F4A7C15) & _UINT64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _UINT64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _UINT64
    return ((mixed ^ mixed >> 31) >> 11) * 2.0**-53


def _between(limits: tuple[float, float], share: float) -> float:
    return limits[0] + (limits[1] - limits[0]) * share


def _scaled(box: Box, size: tuple[int, int], small: tuple[int, int]) -> Box:
    """Convert a box in an image of `size` to the same box in this image decoded to the size `small`."""
    vertical, horizontal = small[0] / size[0], small[1] / size[1]
    top, left = int(box.top * vertical), int(box.left * horizontal)
    height, width = max(1, round(box.height * vertical)), max(1, round(box.width * horizontal))
    return Box(top, left, min(height, small[0] - top), min(width, small[1] - left))


def _part(image: Image, box: Box) -> Image:
    return image[box.top : box.top + box.height, box.left : box.left + box.width]


def _jpeg_header(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG in a colour space that simplejpeg converts; None: any other image."""
    if not data.startswith(JPEG):
        return None
    height, width, space, _ = require("simplejpeg", "images").decode_jpeg_header(data)
    check_pixels(height, width)
    return None if space in ("CMYK", "YCCK") else (height, width)


def _decoded_by_opencv(data: bytes, orient: bool) -> Image:
    check_image(data)
    cv2 = require("cv2", "images")
    flags = cv2.IMREAD_COLOR | (0 if orient else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        image: Image | None = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise ValueError(f"OpenCV cannot decode this image: {error}") from error
    if image is None:
        raise not_an_image(data)
    cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)  # IMREAD_COLOR_RGB would leave an AVIF with alpha in BGR
    return image


def _resize_into(out: Image, image: Image, mirror: bool) -> None:
    cv2 = require("cv2", "images")
    size, longest, shortest = out.shape[0], max(image.shape[:2]), min(image.shape[:2])
    shrink = 1
    while longest > 2 * shrink * size:
        shrink *= 2
    if shrink > 1 and longest <= 2 * shortest:
        # INTER_AREA shrinks many times as fast by a whole number as by a fraction, and the result is as smooth
        image = cv2.resize(image, (shrink * size, shrink * size), interpolation=cv2.INTER_LINEAR)
    how = cv2.INTER_AREA if shrink > 1 else cv2.INTER_LINEAR
    written = cv2.resize(image, (size, size), dst=out, interpolation=how)
    if mirror:
        written = cv2.flip(written, 1, dst=written)  # NumPy takes forty times as long
    if written is not out and not np.may_share_memory(written, out):
        out[...] = written
