"""The limit of NumPy: threads that only copy rows into six buffers, which are reused. Nothing is placed.

Every loader has to do at least this: np.take writes each row once. mode="clip" avoids the temporary array
that mode="raise" makes beside `out`. A pipeline, too, has about six batches in flight; fewer buffers would
stay in the processor's cache.
"""

import math
import mmap
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

BUFFERS = 6


def batches(task):
    """Yield each buffer once it is full. It is overwritten after the next buffer is requested."""
    rows = task.load()
    return copied(task, lambda indices, out: np.take(rows, indices, axis=0, out=out, mode="clip"))


def copied(task, gather):
    """Yield batches that `gather(indices, out)` makes on `task.threads` threads. A thread makes a whole batch."""

    def filled(indices, buffer):
        gather(indices, buffer)
        return buffer

    free = deque(jax.tree.map(_mapped, task.spec) for _ in range(BUFFERS))
    order = next(task.orders())
    count = len(order) // task.batch_rows
    batches = order[: count * task.batch_rows].reshape(count, task.batch_rows)
    running = deque()
    with ThreadPoolExecutor(task.threads) as pool:
        for indices in task.again(batches):
            running.append(pool.submit(filled, indices, free.popleft()))
            if not free:
                buffer = running.popleft().result()
                yield buffer
                free.append(buffer)
        for future in running:
            yield future.result()


def _mapped(spec):
    size = math.prod(spec.shape) * spec.dtype.itemsize
    return np.frombuffer(mmap.mmap(-1, size), spec.dtype).reshape(spec.shape)
