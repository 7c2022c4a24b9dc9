"""Grain record by record, with the settings that were fastest.

Sources: ReadOptions' own documentation, which recommends 0 threads for data in memory to avoid contention
for the GIL, and google-grain.readthedocs.io/en/latest/tutorials/dataset_advanced_tutorial.html for
mp_prefetch. Batching rows after to_iter_dataset was 1.3 times slower with 0 threads, and ten times with 2:
each row then passes a queue.
"""

import grain
from absl import flags

SETTINGS = {"threads": 0, "workers": 0, "batch_first": True, "cpu_buffer": 1, "device_buffer": 1}


def batches(task, threads, workers, batch_first, cpu_buffer, device_buffer):
    """`batch_first`: an element that Grain reads is a batch; else a row, and rows are batched afterwards."""
    source = task.records() if workers else task.load()
    dataset = grain.MapDataset.source(source).seed(42).shuffle().repeat(task.epochs)
    if batch_first:
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        dataset = dataset.batch(task.batch_rows, drop_remainder=True).to_iter_dataset(options)
    else:
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=500)
        dataset = dataset.to_iter_dataset(options).batch(task.batch_rows, drop_remainder=True)
    if workers:
        flags.FLAGS.mark_as_parsed()  # else mp_prefetch refuses to run outside an absl app
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1))
    iterator = iter(
        grain.experimental.device_put(
            dataset, task.sharding, cpu_buffer_size=cpu_buffer, device_buffer_size=device_buffer
        )
    )
    try:
        yield from iterator
    finally:
        iterator.close()
