"""Feeds over sources that may stop to be told what comes next: those of stores, once all blocks are here."""

from typing import ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline


class Told:
    """Rows in memory, whose source need be told of reads at every second look."""

    spec: ClassVar = {"x": jax.ShapeDtypeStruct((), np.int32)}
    identity: ClassVar = {}
    looks = 0

    @property
    def will_read(self):
        self.looks += 1
        return (lambda rows, ahead: True) if self.looks % 2 else None

    def __len__(self):
        return 64

    def read(self, rows, out):
        out["x"][:] = rows

    def close(self):
        pass


def test_the_last_block_may_arrive_while_a_source_is_told_what_comes_next():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with feedline.Feed(Told(), 16, sharding, epochs=1) as feed:
        assert len(list(feed)) == 4
    mixture = feedline.Mixture({"a": Told(), "b": Told()}, {"a": 1, "b": 1})
    assert all(mixture._will_read(np.arange(128), 0) for _ in range(3))
