"""PyTorch's DataLoader as it is usually written: a dataset of rows, batch_size, shuffle=True.

Source: docs.pytorch.org/docs/2.13/data.html, "Automatic batching (default)".
Two workers were not faster on two cores.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset


def batches(task):
    """Iterate over the loader once per epoch."""
    dataset = TensorDataset(torch.from_numpy(task.load()))
    for (batch,) in task.again(DataLoader(dataset, task.batch_rows, shuffle=True, drop_last=True)):
        yield task.placed(batch.numpy())
