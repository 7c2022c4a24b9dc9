"""Grain with feedline's decoders: source, shuffle, repeat, random_map, batch, device_put.

Sources: google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html for random_map with a seed,
dataset_advanced_tutorial.html for mp_prefetch, and ReadOptions' own documentation for threads.
"""

import grain
import numpy as np
from absl import flags
from same_decoders import FileDecoder

SETTINGS = {"threads": 2, "workers": 0, "batch_first": True, "ahead": 2}
AT_ONCE = 2


class Files:
    """Random access to (path, label)."""

    def __init__(self, task):
        self.paths, self.labels = task.files()

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.paths[index], self.labels[index]


class Decode(grain.transforms.RandomMap):
    """A file → {"image", "label"}."""

    def __init__(self, task):
        self.decoder = FileDecoder(task)

    def random_map(self, element, rng):
        """The crop depends on Grain's generator for this element."""
        path, label = element
        return {"image": self.decoder.array(path, int(rng.integers(2**63))), "label": np.int32(label)}


def batches(task, threads, workers, batch_first, ahead):
    """`batch_first`: an element that Grain reads is a batch; else an image, and images are batched afterwards."""
    dataset = grain.MapDataset.source(Files(task)).seed(42).shuffle().repeat(task.epochs).random_map(Decode(task))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    if batch_first:
        dataset = dataset.batch(task.batch_rows, drop_remainder=True).to_iter_dataset(options)
    else:
        dataset = dataset.to_iter_dataset(options).batch(task.batch_rows, drop_remainder=True)
    if workers:
        flags.FLAGS.mark_as_parsed()  # else mp_prefetch refuses to run outside an absl app
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1))
    iterator = iter(grain.experimental.device_put(dataset, task.sharding, cpu_buffer_size=1, device_buffer_size=1))
    try:
        yield from iterator
    finally:
        iterator.close()
