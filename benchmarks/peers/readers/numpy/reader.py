"""What one writes without a library: np.take, then jax.device_put with a sharding.

jax.make_array_from_process_local_data does the same in one process. np.take was 1.3 to 3 times as
fast as rows[indices].
"""

import numpy as np


def batches(task):
    """Each epoch in the order of a NumPy permutation."""
    rows = task.load()
    for order in task.orders():
        for start in range(0, len(order), task.batch_rows):
            yield task.placed(np.take(rows, order[start : start + task.batch_rows], axis=0))
