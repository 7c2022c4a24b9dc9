"""The task of the benchmark of images: a folder of class folders of JPEGs."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from marked import recognised
from task import Task


@dataclasses.dataclass(frozen=True)
class Images(Task):
    """Random crops of images, half of them mirrored: {"image": uint8[rows, size, size, 3], "label": int32[rows]}.

    Attributes:
      images: a folder of class folders, the same for every peer; a label is the rank of its class folder's name.
      size: height and width of an image in a batch.
      scale: the least and the greatest area of a crop, as a share of the image.
      ratio: the least and the greatest width ÷ height of a crop.
    """

    images: str
    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    @property
    def spec(self):
        """The shape and dtype of a batch."""
        return {
            "image": jax.ShapeDtypeStruct((self.batch_rows, self.size, self.size, 3), np.uint8),
            "label": jax.ShapeDtypeStruct((self.batch_rows,), np.int32),
        }

    def __len__(self):
        return len(self.files()[0])

    def files(self):
        """All paths in sorted order, and their labels."""
        classes = sorted(path for path in Path(self.images).iterdir() if path.is_dir())
        files = [(str(path), label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]
        return [path for path, _ in files], [label for _, label in files]

    def placed(self, image, label):
        """Place a batch of NumPy arrays on the mesh."""
        return jax.device_put({"image": image, "label": label.astype(np.int32, copy=False)}, self.sharding)

    def compare(self, batches, limit):
        """Compare batches with the marked images, which are recognised after any crop. Their labels must be right.

        `area` is the mean area of a crop as a share of its image, `mirrored` the share of mirrored images.
        """
        labels, wrong, seen = self.files()[1], 0, []
        for batch in batches:
            for image, label in zip(np.asarray(batch["image"]), np.asarray(batch["label"]).tolist(), strict=True):
                found = recognised(image)
                right = found.index in range(len(labels)) and labels[found.index] == label
                wrong += not (right and found.fits(self.scale, self.ratio))
                seen.append(found)
        expected = len(self) if limit is None else min(len(self), limit * self.batch_rows)
        return {
            **self.report(np.array([found.index for found in seen]), wrong, expected),
            "area": float(np.mean([found.area for found in seen])),
            "mirrored": float(np.mean([found.mirrored for found in seen])),
        }
