"""PyTorch's DataLoader with a dataset that is asked for a batch at once.

Source: docs.pytorch.org/docs/2.13/data.html, "Disable automatic batching": batch_size=None, and a
sampler whose elements are lists of indices. Better still: elements that are tensors, and index_select, which
was 3 to 4 times as fast as rows[index]. Two workers were slower: each batch crosses shared memory.
"""

import jax
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

SETTINGS = {"workers": 0, "vectors": True, "select": True}


class Rows(Dataset):
    """Rows that are had by a list or a tensor of indices."""

    def __init__(self, rows, select):
        self.rows, self.select = rows, select

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows.index_select(0, torch.as_tensor(index)) if self.select else self.rows[index]


class Vectors(Sampler):
    """BatchSampler(RandomSampler) whose elements are tensors: no index becomes a Python number."""

    def __init__(self, count, batch_rows):
        self.count, self.batch_rows = count, batch_rows

    def __iter__(self):
        yield from torch.randperm(self.count).split(self.batch_rows)

    def __len__(self):
        return self.count // self.batch_rows


def batches(task, workers, vectors, select):
    """The loader again for each epoch; workers stay."""
    rows = Rows(torch.from_numpy(task.load()), select)
    lists = BatchSampler(RandomSampler(rows), task.batch_rows, drop_last=True)
    loader = DataLoader(
        rows,
        sampler=Vectors(len(rows), task.batch_rows) if vectors else lists,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    sharding, epoch = task.sharding, 0
    while task.epochs is None or epoch < task.epochs:
        for batch in loader:
            yield jax.device_put(batch.numpy(), sharding)
        epoch += 1
