"""PyTorch's DataLoader as it is usually written: a dataset of rows, batch_size, shuffle=True.

Source: docs.pytorch.org/docs/2.13/data.html, "Automatic batching (default)".
Two workers were not faster on two cores.
"""

import jax
import torch
from torch.utils.data import DataLoader, TensorDataset

SETTINGS = {"workers": 0}


def batches(task, workers):
    """The loader again for each epoch; workers stay."""
    loader = DataLoader(
        TensorDataset(torch.from_numpy(task.load())),
        batch_size=task.batch_rows,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    sharding, epoch = task.sharding, 0
    while task.epochs is None or epoch < task.epochs:
        for (batch,) in loader:
            yield jax.device_put(batch.numpy(), sharding)
        epoch += 1
