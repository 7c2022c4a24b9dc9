"""Random crop and flip as a vectorised transform. The results are the same on any number of devices.

python examples/crop_and_flip.py
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.lib.stride_tricks import sliding_window_view

import feedline

SIZE = 32
"""Height and width of a cropped image. Images of the source have 40 × 40 pixels."""


def crop_and_flip(batch: dict[str, np.ndarray], rows: feedline.Rows) -> dict[str, np.ndarray]:
    """Crop each image at random and mirror half of them.

    The randomness comes from rows.key: 64 random bits a row, a function of (seed, epoch, position). So an
    image is cropped in the same way by any process, thread or worker, and in another way in each epoch.
    There is no loop: one gather and one `np.where` handle all images of the call.
    """
    image = batch["image"]  # uint8[k, 40, 40, 3]
    offsets = image.shape[1] - SIZE + 1
    top, left = rows.key % offsets, rows.key // offsets % offsets
    mirrored = rows.key >> 63 == 1  # the highest bit, which the crop does not use

    windows = sliding_window_view(image, (SIZE, SIZE), axis=(1, 2))  # [k, 9, 9, 3, 32, 32], no copy
    cropped = np.moveaxis(windows[np.arange(len(image)), top, left], 1, -1)
    return {**batch, "image": np.where(mirrored[:, None, None, None], cropped[:, :, ::-1], cropped)}


def images_on(devices: list[jax.Device], source: dict[str, np.ndarray]) -> np.ndarray:
    """All images of two epochs, read back from the devices."""
    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    with feedline.Feed(source, batch_size=64, sharding=sharding, epochs=2, transform=crop_and_flip) as feed:
        return np.concatenate([np.asarray(batch["image"]) for batch in feed])


def main() -> None:
    generator = np.random.default_rng(0)
    source = {
        "image": generator.integers(256, size=(512, 40, 40, 3), dtype=np.uint8),
        "label": generator.integers(10, size=512, dtype=np.int32),
    }
    one, all_ = images_on(jax.devices()[:1], source), images_on(jax.devices(), source)
    print(f"{one.shape} {one.dtype}")
    print(f"{jax.device_count()} devices hold the images that 1 device held: {np.array_equal(one, all_)}")


if __name__ == "__main__":
    main()
