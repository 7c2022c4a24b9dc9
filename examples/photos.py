"""A convolutional net learns to tell photographs apart, from JPEG files to the last layer.

pip install '.[images]' scikit-learn
python examples/photos.py [FOLDER]

FOLDER holds train and test, each with a folder of images for each class: FOLDER/train/cat/1.jpg. Without FOLDER,
the example makes one from the two photographs that scikit-learn ships: 400 pieces for training, and 100 pieces of
other parts of the same photographs for the test. The net is trained on random crops, which differ in each epoch,
and tested on the centres.
"""

import functools
import itertools
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import simplejpeg
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_sample_images

import feedline
from feedline.trainer import fit, mean_of_valid

SIZE, PIECE = 32, 96
CHANNELS = (3, 16, 32)


def make_pieces(folder: Path) -> None:
    """Write pieces of the photographs as JPEG: the left two thirds for training, the rest for the test."""
    random = np.random.default_rng(0)
    for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
        border = photo.shape[1] * 2 // 3
        for part, (left, right), count in (("train", (0, border), 200), ("test", (border, photo.shape[1]), 50)):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                y = random.integers(photo.shape[0] - PIECE)
                x = random.integers(left, right - PIECE)
                piece = simplejpeg.encode_jpeg(
                    np.ascontiguousarray(photo[y : y + PIECE, x : x + PIECE]), quality=90
                )
                (folder / part / name / f"{i:03d}.jpg").write_bytes(piece)


def init(key: jax.Array, classes: int) -> list[jax.Array]:
    """The filters of two layers of convolutions, and the weights of the last layer."""
    keys = jax.random.split(key, len(CHANNELS))
    filters = [
        jax.random.normal(key, (3, 3, *pair)) * (2 / (9 * pair[0])) ** 0.5
        for key, pair in zip(keys, itertools.pairwise(CHANNELS), strict=False)
    ]
    return [*filters, jnp.zeros((CHANNELS[-1], classes))]


def loss(params: list[jax.Array], batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean cross-entropy, and the share of images that are recognised."""
    x = batch["image"].astype(jnp.float32) / 127.5 - 1  # on the device: a quarter of the bytes are transferred
    *filters, last = params
    for each in filters:
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, each, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    scores = x.mean(axis=(1, 2)) @ last
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])
    right = (scores.argmax(axis=1) == batch["label"]).astype(jnp.float32)
    return mean_of_valid(losses, batch), {"recognised": mean_of_valid(right, batch)}


def main() -> None:
    """Train, and print the share of test images that the net recognises."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        if len(sys.argv) == 1:
            make_pieces(folder)
        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
        files = feedline.open_source(folder / "train")
        train = feedline.images.decode(files, SIZE, "random", flip=True)
        test = feedline.images.decode(folder / "test", SIZE)
        with (
            feedline.Feed(train, 40, sharding) as feed,
            feedline.Feed(test, 40, sharding, epochs=1, remainder="pad") as test_feed,
        ):
            fitted = fit(
                feed, functools.partial(init, classes=len(files.classes)), loss, optax.adam(5e-3), steps=150
            )
            recognised = float(fitted.evaluate(test_feed).metrics["recognised"])
        print(f"{len(train)} images for training; of {len(test)} others {recognised:.0%} are recognised")


if __name__ == "__main__":
    main()
