"""Grain packs documents of different lengths into rows of 128 tokens, in each of four lanes.

python examples/token_packing.py
"""

import json

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

LENGTH = 128


def document(i: int) -> dict[str, np.ndarray]:
    """Stands in for your tokenised text: document i repeats the token i, 5 to 100 times."""
    return {"tokens": np.full(5 + i * 7919 % 96, i, np.int32)}


def make_lane(lane: int, count: int) -> grain.IterDataset:
    """Every `count`-th document, shuffled, and packed: each row holds as many documents as fit."""
    documents = grain.MapDataset.range(lane, 2000, count).seed(lane).shuffle().map(document).to_iter_dataset()
    packed = grain.experimental.FirstFitPackIterDataset(
        documents, length_struct={"tokens": LENGTH}, num_packing_bins=16
    )
    return packed.map(
        lambda row: {
            "tokens": row["tokens"],
            "segments": row[
                "tokens_segment_ids"
            ],  # the number of the document in the row; 0 where the row is not filled
            "positions": row["tokens_positions"],
        }
    )


def main() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    lanes = feedline.Lanes(make_lane, count=4)

    with feedline.Feed(lanes, batch_size=32, sharding=sharding, epochs=1, remainder="pad") as feed:
        for _, batch in zip(range(5), feed, strict=False):
            filled = float((batch["segments"] > 0).mean())
        print(f"{batch['tokens'].shape} tokens in a batch, {filled:.0%} of them filled")
        state = json.dumps(feed.get_state())  # several processes: feedline.save_lanes(feed.get_state(), folder)

    with feedline.Feed(lanes, batch_size=16, sharding=sharding, epochs=1, remainder="pad") as feed:
        feed.set_state(json.loads(state))  # continues with the next row of each lane, now in batches of 16
        rows = sum(int(batch["valid"].sum()) for batch in feed)
    print(f"{5 * 32} rows before the resume and {rows} after it")


if __name__ == "__main__":
    main()
