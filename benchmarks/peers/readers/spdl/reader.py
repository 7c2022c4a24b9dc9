"""SPDL: a pipeline of two stages, whole batches read by np.take, then placed.

Source: facebookresearch.github.io/spdl/0.8.0, "Building and Running Pipeline" and "Pipeline Parallelism".
On two cores, neither 1 to 4 threads, nor placing outside of the pipeline, made a difference above the noise.
"""

import numpy as np
from spdl.pipeline import PipelineBuilder

THREADS = 2


def batches(task):
    """Yield batches in the order in which they get ready, SPDL's default."""
    rows = task.load()

    def indices():
        for order in task.orders():
            yield from order.reshape(-1, task.batch_rows)

    builder = PipelineBuilder().add_source(indices())
    builder = builder.pipe(lambda index: np.take(rows, index, axis=0), concurrency=THREADS).pipe(task.placed)
    pipeline = builder.add_sink(2).build(num_threads=THREADS + 1)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()
