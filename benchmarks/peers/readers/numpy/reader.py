"""What one writes without a library: rows[indices] or np.take, then jax.device_put with a sharding.

jax.make_array_from_process_local_data does the same in one process. np.take was 1.3 to 3 times as
fast as rows[indices].
"""

import jax
import numpy as np

SETTINGS = {"take": True}


def batches(task, take):
    """Each epoch in the order of a NumPy permutation."""
    rows, sharding = task.load(), task.sharding
    for order in task.orders():
        for start in range(0, len(order), task.batch_rows):
            index = order[start : start + task.batch_rows]
            yield jax.device_put(np.take(rows, index, axis=0) if take else rows[index], sharding)
