"""Images that can be recognised after they were cropped, resized and mirrored. Pure.

Red is the number of the image, green grows from left to right, blue from top to bottom.
"""

import dataclasses

import numpy as np

HEIGHT, WIDTH = 240, 320
MOST = 40
"""How many images there can be; their reds differ by five."""
_FIRST_RED, _STEP = 20, 5
_TOLERANCE = 8
"""By how much a value may differ: JPEG and resizing round."""


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
      error: the largest difference of a value from those of such a crop, without the outermost pixels.
    """

    index: int
    height: float
    width: float
    mirrored: bool
    error: float

    @property
    def area(self):
        """Of the crop, as a share of the image."""
        return self.height * self.width

    def fits(self, scale, ratio):
        """Whether it is a crop of such a scale and ratio, and of an image that was decoded right."""
        shape = self.width * WIDTH / (self.height * HEIGHT)
        return (
            self.error <= _TOLERANCE
            and 0.9 * scale[0] <= self.area <= 1.05 * scale[1]
            and 0.9 * ratio[0] <= shape <= 1.1 * ratio[1]
        )


def recognised(image):
    """Which marked image it is, and which part of it."""
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
