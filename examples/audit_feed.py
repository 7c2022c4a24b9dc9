"""A feed to audit: sharded along rows and columns, with a random augmentation.

feedline audit examples.audit_feed:make_feed --processes 1,2

Audit the same function that your training calls.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline


def mirrored(batch, rows):
    """Mirrors half of the images. `rows.key` selects them, so the same images are mirrored on any layout."""
    flip = (rows.key % 2 == 1)[:, None, None]
    return {**batch, "image": np.where(flip, batch["image"][:, :, ::-1], batch["image"])}


def make_feed(mesh: Mesh) -> feedline.Feed:
    random = np.random.default_rng(0)
    rows = {
        "image": random.integers(256, size=(1000, 8, 8), dtype=np.uint8),
        "label": random.integers(10, size=1000, dtype=np.int32),
    }
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    by_row_and_column = NamedSharding(mesh, PartitionSpec("data", "model"))
    sharding = {"image": by_row_and_column, "label": by_row}
    return feedline.Feed(rows, batch_size=64, sharding=sharding, transform=mirrored)


def main() -> None:
    """Takes one batch, without the audit."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "model"))
    with make_feed(mesh) as feed:
        batch = next(feed)
        print(f"{batch['image'].shape} {batch['image'].dtype} on {len(jax.devices())} devices")


if __name__ == "__main__":
    main()
