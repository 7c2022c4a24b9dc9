"""tf.data over shuffled indices, with a gather for each batch.

Source: tensorflow.org/guide/data_performance: "Vectorizing mapping", "Parallel mapping", prefetch.
Indices shuffled as one tensor were 10 to 50 times as fast as Dataset.range(n).shuffle(n).
"""

import jax
import tensorflow as tf

SETTINGS = {"vectors": True, "parallel": 2, "prefetch": 2}


def batches(task, vectors, parallel, prefetch):
    """`vectors`: an epoch's indices are shuffled as one tensor; else one by one, in a shuffle buffer."""
    rows = tf.constant(task.load())
    count = len(rows)
    if vectors:
        epochs = tf.data.Dataset.range(1).repeat(task.epochs)
        indices = epochs.flat_map(lambda _: _shuffled(count, task.batch_rows))
    else:
        indices = tf.data.Dataset.range(count).shuffle(count).repeat(task.epochs)
        indices = indices.batch(task.batch_rows, drop_remainder=True)
    dataset = indices.map(lambda i: tf.gather(rows, i), num_parallel_calls=parallel).prefetch(prefetch)
    sharding = task.sharding
    for batch in dataset.as_numpy_iterator():
        yield jax.device_put(batch, sharding)


def _shuffled(count, batch_rows):
    order = tf.random.shuffle(tf.range(count, dtype=tf.int64))
    return tf.data.Dataset.from_tensor_slices(tf.reshape(order, (-1, batch_rows)))
