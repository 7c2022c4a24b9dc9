"""feedline's decoders for other loaders. Their environments lack feedline, so it is imported from this tree."""

import dataclasses
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[3]))

from feedline._src.images import ImageDecoder
from feedline._src.sources.decoded import Row


@dataclasses.dataclass(frozen=True)
class FileDecoder:
    """Decodes files of an `Images` task. Picklable."""

    task: object

    def into(self, image, data, key):
        """Decode a file's bytes into `image`: a crop that depends on the key."""
        decode = ImageDecoder(self.task.size, "random", True, self.task.scale, self.task.ratio, False, None, None)
        decode(data, {"image": image}, Row(0, 0, 0, key))

    def array(self, path, key):
        """The image as a new array."""
        image = np.empty((self.task.size, self.task.size, 3), np.uint8)
        self.into(image, Path(path).read_bytes(), key)
        return image
