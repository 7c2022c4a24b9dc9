"""A source and a feed to look at before training: 1,437 handwritten digits.

feedline inspect examples.inspect_feed:source --mesh data=4,model=2 --processes 2 --batch-size 100
feedline inspect examples.inspect_feed:make_feed --mesh data=4,model=2

The mesh need not exist.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline.trainer import digits

source = digits().train


def make_feed(mesh: Mesh) -> feedline.Feed:
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    by_row_and_column = NamedSharding(mesh, PartitionSpec("data", "model"))
    return feedline.Feed(source, batch_size=96, sharding={"image": by_row_and_column, "label": by_row}, epochs=1)


def main() -> None:
    """Takes one epoch, to compare with the output of the command."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))
    with make_feed(mesh) as feed:
        shards = {shard.data.shape for batch in feed for shard in batch["image"].addressable_shards}
        delivered = feed.statistics()
    print(f"{delivered.batches} batches, {delivered.dropped_rows} rows left out, shards {shards}")


if __name__ == "__main__":
    main()
