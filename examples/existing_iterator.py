"""Prefetch for an existing iterator, so that its transfers overlap the compute.

python examples/existing_iterator.py
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline


class MyLoader:
    """An example of a loader that, like many, writes every batch into the same memory."""

    def __init__(self, batches: int) -> None:
        self.batch = {"x": np.empty((64, 32), np.float32)}
        self.batches = batches
        self.given = 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.given == self.batches:
            raise StopIteration
        self.batch["x"][:] = self.given
        self.given += 1
        return self.batch

    def get_state(self) -> dict[str, int]:
        return {"given": self.given}


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(lambda batch: jnp.mean(batch["x"]))

    with feedline.prefetch_to_mesh(MyLoader(5), sharding) as batches:
        for batch in batches:
            # two more batches are already placed, but the state counts only delivered batches
            print(f"mean {step(batch):.0f}, state {batches.get_state()}")


if __name__ == "__main__":
    main()
