"""Grain as its JAX tutorial writes it: source, shuffle, repeat, batch, to_iter_dataset, device_put.

Source: google-grain.readthedocs.io/en/latest/tutorials/jax_training_tutorial.html, section 5. Nothing is
tuned: ReadOptions() has 16 threads, and each makes a whole batch.
"""

import grain

AT_ONCE = 16


def batches(task):
    """Batches on the mesh, from Grain's own two stages of prefetching."""
    dataset = grain.MapDataset.source(task.load()).seed(42).shuffle().repeat(task.epochs)
    dataset = dataset.batch(task.batch_rows, drop_remainder=True).to_iter_dataset()
    iterator = iter(grain.experimental.device_put(dataset, task.sharding, cpu_buffer_size=4, device_buffer_size=2))
    try:
        yield from iterator
    finally:
        iterator.close()
