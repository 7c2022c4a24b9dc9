"""Grain record by record, with the settings that were fastest.

Source: ReadOptions' own documentation, which recommends 0 threads for data in memory to avoid
contention for the GIL.
"""

import grain

SETTINGS = {"threads": 0, "batch_first": True, "cpu_buffer": 1, "device_buffer": 1}


def batches(task, threads, batch_first, cpu_buffer, device_buffer):
    """`batch_first`: an element that Grain reads is a batch; else a row, and rows are batched afterwards."""
    dataset = grain.MapDataset.source(task.load()).seed(42).shuffle().repeat(task.epochs)
    if batch_first:
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        dataset = dataset.batch(task.batch_rows, drop_remainder=True).to_iter_dataset(options)
    else:
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=500)
        dataset = dataset.to_iter_dataset(options).batch(task.batch_rows, drop_remainder=True)
    iterator = iter(
        grain.experimental.device_put(
            dataset, task.sharding, cpu_buffer_size=cpu_buffer, device_buffer_size=device_buffer
        )
    )
    try:
        yield from iterator
    finally:
        iterator.close()
