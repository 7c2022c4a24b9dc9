"""SPDL's pipeline of threads with feedline's decoders, which write into the memory of the batch.

Sources: facebookresearch.github.io/spdl/0.8.0, "Building and Running Pipeline" and "Pipeline Parallelism": any
function that releases the GIL can be a stage.
"""

from pathlib import Path

import numpy as np
from same_decoders import FileDecoder
from spdl.pipeline import PipelineBuilder

THREADS, PARTS = 2, 2


def batches(task):
    """The source splits a batch into parts, threads decode the parts, and the last stage places the batch."""
    decoder, (paths, labels) = FileDecoder(task), task.files()
    labels, rng = np.array(labels, np.int32), np.random.default_rng(0)
    size = task.batch_rows // PARTS

    def split():
        for order in task.orders():
            for k in range(len(order) // task.batch_rows):
                indices = order[k * task.batch_rows : (k + 1) * task.batch_rows]
                batch = np.empty((task.batch_rows, task.size, task.size, 3), np.uint8)
                for start in range(0, task.batch_rows, size):
                    keys = rng.integers(2**63, size=size).tolist()
                    yield batch, labels[indices], start, indices[start : start + size].tolist(), keys

    def decode(part):
        batch, batch_labels, start, indices, keys = part
        for place, (index, key) in enumerate(zip(indices, keys, strict=True), start):
            decoder.into(batch[place], Path(paths[index]).read_bytes(), key)
        return batch, batch_labels

    builder = PipelineBuilder().add_source(split()).pipe(decode, concurrency=THREADS, output_order="input")
    builder = builder.aggregate(PARTS).pipe(lambda done: task.placed(*done[0])).add_sink(2)
    pipeline = builder.build(num_threads=THREADS + 1)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()
