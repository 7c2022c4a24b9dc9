"""jax-dataloader with its own backend, "jax", over an array.

Source: github.com/BirkhoffG/jax-dataloader, README. It indexes whole batches; num_workers is ignored
by that backend, so there is nothing to tune.
"""

import jax
import jax_dataloader as jdl

SETTINGS = {}


def batches(task):
    """The loader again for each epoch."""
    dataset = jdl.ArrayDataset(task.load(), asnumpy=True)
    loader = jdl.DataLoader(dataset, backend="jax", batch_size=task.batch_rows, shuffle=True, drop_last=True)
    sharding, epoch = task.sharding, 0
    while task.epochs is None or epoch < task.epochs:
        for (batch,) in loader:
            yield jax.device_put(batch, sharding)
        epoch += 1
