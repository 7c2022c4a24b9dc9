"""What every task of the peers benchmarks has: a batch size, a number of threads and a sharding."""

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Task:
    """The rows to read, and the sharding of their batches.

    Attributes:
      batch_rows: rows in a batch. A last partial batch is left out.
      threads: how many threads to use: the number of cores of this machine, at most 16.
      folder: where a reader's `prepare` writes the data in the peer's own format.
      epochs: how often the rows are read; None: endless.
    """

    batch_rows: int
    threads: int
    folder: str
    epochs: int | None = dataclasses.field(default=None, kw_only=True)

    @property
    def sharding(self):
        """Rows over all eight devices."""
        return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    def placed(self, batch):
        """Place a batch, which is one NumPy array, on the mesh."""
        return jax.device_put(batch, self.sharding)

    def again(self, loader):
        """Yield what a loader yields, once for each epoch."""
        epoch = 0
        while self.epochs is None or epoch < self.epochs:
            yield from loader
            epoch += 1

    def orders(self, seed=0):
        """Yield a random permutation of all rows for each epoch."""
        generator, epoch = np.random.default_rng(seed), 0
        while self.epochs is None or epoch < self.epochs:
            yield generator.permutation(len(self))
            epoch += 1

    def report(self, index, wrong, expected):
        """The result of a check. `index`: for each delivered row, the index that it was recognised to have.

        `jump` measures the shuffle: the mean distance between successive indices, divided by that of a uniform
        shuffle (a third of the number of rows).
        """
        return {
            "rows": len(index),
            "wrong": wrong,
            "repeated": len(index) - len(np.unique(index)),
            "missing": expected - len(np.unique(index)),
            "jump": float(np.abs(np.diff(index)).mean() / (len(self) / 3)),
        }
