"""tf.data over slices of the array, with a shuffle buffer that holds all rows.

Sources: tensorflow.org/guide/data ("Consuming NumPy arrays", "Randomly shuffling input data") and
tensorflow.org/guide/data_performance (prefetch). AUTOTUNE in place of 2 made no difference.
"""

import tensorflow as tf


def batches(task):
    """TensorFlow's buffers are aligned, so that JAX takes them without a copy."""
    rows = task.load()
    dataset = tf.data.Dataset.from_tensor_slices(rows).shuffle(len(rows)).repeat(task.epochs)
    dataset = dataset.batch(task.batch_rows, drop_remainder=True).prefetch(2)
    yield from map(task.placed, dataset.as_numpy_iterator())
