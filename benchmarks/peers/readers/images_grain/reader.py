"""Grain with feedline's decoders: source, shuffle, repeat, random_map, batch, device_put.

Sources: google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html for random_map with a seed,
and ReadOptions' own documentation for threads. An element that Grain reads is a batch; batching images
afterwards, and worker processes, were slower.
"""

import grain
import numpy as np
from same_decoders import FileDecoder

AT_ONCE = 2


class Decode(grain.transforms.RandomMap):
    """The number of a file → {"image", "label"}."""

    def __init__(self, task):
        self.decoder, (self.paths, self.labels) = FileDecoder(task), task.files()

    def random_map(self, index, rng):
        """The crop depends on Grain's generator for this element."""
        image = self.decoder.array(self.paths[index], int(rng.integers(2**63)))
        return {"image": image, "label": np.int32(self.labels[index])}


def batches(task):
    """Batches on the mesh."""
    dataset = grain.MapDataset.range(len(task)).seed(42).shuffle().repeat(task.epochs).random_map(Decode(task))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
    dataset = dataset.batch(task.batch_rows, drop_remainder=True).to_iter_dataset(options)
    iterator = iter(grain.experimental.device_put(dataset, task.sharding, cpu_buffer_size=1, device_buffer_size=1))
    try:
        yield from iterator
    finally:
        iterator.close()
