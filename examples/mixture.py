"""A weighted mixture of two data sets, one of them filtered. Grain mixes them, in each of four lanes.

python examples/mixture.py
"""

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline


def example(origin: int, i: int) -> dict[str, np.ndarray]:
    """Stands in for a record: the number of its data set, and its own number in that data set."""
    return {"origin": np.int32(origin), "number": np.int32(i)}


def make_lane(lane: int, count: int) -> grain.IterDataset:
    """Of four examples, three are from the first data set and one from the second. Both repeat endlessly."""
    web = grain.MapDataset.range(lane, 40_000, count).map(lambda i: example(0, i))
    books = grain.MapDataset.range(lane, 3_000, count).map(lambda i: example(1, i))
    return grain.IterDataset.mix(
        [
            web.seed(lane).shuffle().repeat().to_iter_dataset().filter(lambda row: row["number"] % 3 != 0),
            books.seed(lane).shuffle().repeat().to_iter_dataset(),
        ],
        weights=[0.75, 0.25],
    )


def main() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    counts = np.zeros(2, int)
    with feedline.Feed(feedline.Lanes(make_lane, count=4), batch_size=64, sharding=sharding) as feed:
        for _, batch in zip(range(100), feed, strict=False):  # these lanes have no end
            counts += np.bincount(np.asarray(batch["origin"]), minlength=2)
    web, books = counts / counts.sum()
    print(f"of {counts.sum()} rows {web:.0%} from the web, {books:.0%} from books")


if __name__ == "__main__":
    main()
