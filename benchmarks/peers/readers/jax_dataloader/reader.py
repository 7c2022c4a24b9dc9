"""jax-dataloader with its own backend, "jax", over an array.

Source: github.com/BirkhoffG/jax-dataloader, README. This backend indexes whole batches and ignores
num_workers, so there is nothing to tune.
"""

import jax_dataloader as jdl


def batches(task):
    """Iterate over the loader once per epoch."""
    dataset = jdl.ArrayDataset(task.load(), asnumpy=True)
    loader = jdl.DataLoader(dataset, backend="jax", batch_size=task.batch_rows, shuffle=True, drop_last=True)
    for (batch,) in task.again(loader):
        yield task.placed(batch)
