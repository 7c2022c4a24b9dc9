"""The limit of NumPy: threads that only copy rows into six buffers, used again and again. Nothing is placed.

What every loader has to do, without the rest: np.take writes each row once. mode="clip" spares the
hidden temporary that mode="raise" makes beside `out`. Six buffers, because a pipeline has that many
batches on their way, and fewer would stay in the cache.
"""

import math
import mmap
import queue
import threading

import jax
import numpy as np

BUFFERS = 6


def batches(task):
    """The buffers as they get full; a buffer is written again when the next one is asked for."""
    rows = task.load()
    return copied(task, lambda indices, out: np.take(rows, indices, axis=0, out=out, mode="clip"))


def copied(task, gather):
    """Batches that `gather(indices, out)` makes, on `task.threads` threads. A thread makes a whole batch."""
    order = next(task.orders())
    count = len(order) // task.batch_rows
    indices = order[: count * task.batch_rows].reshape(count, task.batch_rows)
    free, full, turns = queue.SimpleQueue(), queue.SimpleQueue(), iter(_turns(count, task.epochs))
    turn = threading.Lock()

    def copy():
        while (buffer := free.get()) is not None:
            with turn:
                k = next(turns, None)
            if k is None:
                break
            gather(indices[k], buffer)
            full.put(buffer)

    threads = [threading.Thread(target=copy) for _ in range(task.threads)]
    for _ in range(BUFFERS):
        free.put(jax.tree.map(_mapped, task.spec))
    for thread in threads:
        thread.start()
    try:
        for _ in _turns(count, task.epochs):
            buffer = full.get()
            yield buffer
            free.put(buffer)
    finally:
        for _ in range(task.threads):
            free.put(None)
        for thread in threads:
            thread.join()


def _mapped(spec):
    size = math.prod(spec.shape) * spec.dtype.itemsize
    return np.frombuffer(mmap.mmap(-1, size), spec.dtype).reshape(spec.shape)


def _turns(count, epochs):
    """Batch numbers, epoch after epoch."""
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from range(count)
        epoch += 1
