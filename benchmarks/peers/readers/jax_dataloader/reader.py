"""jax-dataloader with its own backend, "jax", over an array.

Source: github.com/BirkhoffG/jax-dataloader, README. It indexes whole batches; num_workers is ignored
by that backend, so there is nothing to tune.
"""

import jax_dataloader as jdl


def batches(task):
    """The loader again for each epoch."""
    dataset = jdl.ArrayDataset(task.load(), asnumpy=True)
    loader = jdl.DataLoader(dataset, backend="jax", batch_size=task.batch_rows, shuffle=True, drop_last=True)
    for (batch,) in task.again(loader):
        yield task.placed(batch)
