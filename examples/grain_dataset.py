"""A Grain dataset decodes and augments record by record; feedline shuffles and places its rows.

python examples/grain_dataset.py
"""

import json
import zlib

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline


def records(count: int) -> list[tuple[bytes, int]]:
    """Stands in for your files: each record is a compressed image and its label."""
    return [(zlib.compress(np.full((12, 12, 3), i % 256, np.uint8)), i % 10) for i in range(count)]


def decode(record: tuple[bytes, int]) -> dict[str, np.ndarray]:
    packed, label = record
    return {"image": np.frombuffer(zlib.decompress(packed), np.uint8).reshape(12, 12, 3), "label": np.int32(label)}


def crop(example: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A random 8 × 8 window, new in each epoch: Grain seeds `rng` by the index, which is epoch × rows + row."""
    y, x = rng.integers(0, 5, size=2)
    return {**example, "image": example["image"][y : y + 8, x : x + 8]}


def main() -> None:
    dataset = grain.MapDataset.source(records(500)).seed(1).map(decode).random_map(crop)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    order = feedline.Order(seed=1)  # without it the dataset keeps its own order

    with feedline.Feed(dataset, batch_size=64, sharding=sharding, order=order, epochs=2) as feed:
        for _, batch in zip(range(5), feed, strict=False):
            labels = batch["label"]
        print(f"5 of {len(feed)} batches: {batch['image'].shape} {batch['image'].dtype}, labels {labels.shape}")
        state = json.dumps(feed.get_state())  # goes into a checkpoint

    with feedline.Feed(dataset, batch_size=32, sharding=sharding, order=order, epochs=2) as feed:
        feed.set_state(json.loads(state))  # continues after row 320, now in batches of 32
        next(feed)
        print(f"resumed at epoch {feed.epoch}, position {feed.position}")


if __name__ == "__main__":
    main()
