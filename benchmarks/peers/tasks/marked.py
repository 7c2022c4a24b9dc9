"""Images that can be recognised after they were cropped, resized and mirrored. Pure.

Red is the number of the image, green grows from left to right, blue from top to bottom.
"""

import dataclasses

import numpy as np

HEIGHT, WIDTH = 240, 320
MOST = 40
"""The largest number of images; their reds differ by five."""
_FIRST_RED, _STEP = 20, 5
_TOLERANCE = 8
"""The largest accepted error of a value: JPEG and resizing round."""


def marked_image(index):
    """uint8[HEIGHT, WIDTH, 3]: image number `index`, below MOST."""
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0] = _FIRST_RED + _STEP * index
    image[..., 1] = np.linspace(0, 255, WIDTH).round()
    image[..., 2] = np.linspace(0, 255, HEIGHT).round()[:, None]
    return image


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is recognised of an image.

    Attributes:
      index: its number.
      height, width: of the crop, as shares of the image.
      mirrored: left and right are exchanged.
      error: the largest difference from the values of an exact crop, except at the border.
    """

    index: int
    height: float
    width: float
    mirrored: bool
    error: float

    @property
    def area(self):
        """The area of the crop, as a share of the image."""
        return self.height * self.width

    def fits(self, scale, ratio):
        """Whether the image was decoded right, and the area and the shape of the crop are in these ranges."""
        shape = self.width * WIDTH / (self.height * HEIGHT)
        return (
            self.error <= _TOLERANCE
            and 0.9 * scale[0] <= self.area <= 1.05 * scale[1]
            and 0.9 * ratio[0] <= shape <= 1.1 * ratio[1]
        )


def recognised(image):
    """Recognise the number of a marked image, and which part of it a crop shows."""
    values = image.astype(np.float64)
    size = len(image)
    index = round((float(np.median(values[..., 0])) - _FIRST_RED) / _STEP)
    expected, slopes = np.full_like(values, _FIRST_RED + _STEP * index), []
    for channel, axis in ((1, 0), (2, 1)):
        line = values[..., channel].mean(axis=axis)
        slope, start = np.polyfit(np.arange(size), line, 1)
        fitted = start + slope * np.arange(size)
        expected[..., channel] = fitted if axis == 0 else fitted[:, None]
        slopes.append(slope * size / 255)
    inner = slice(size // 16, -(size // 16))
    error = float(np.abs(values - expected)[inner, inner].max())
    return Seen(index, slopes[1], abs(slopes[0]), bool(slopes[0] < 0), error)
