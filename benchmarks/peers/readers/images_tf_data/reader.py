"""tf.data: files, a shuffle buffer that holds all paths, and one map that crops while it decodes.

Sources: tensorflow.org/guide/data_performance (parallel map, prefetch) and tf.io.decode_and_crop_jpeg's own
documentation; the crop is that of tf.image.sample_distorted_bounding_box, as in TensorFlow's models of ImageNet.
"""

import tensorflow as tf


def batches(task):
    """JPEGs are decoded by libjpeg's less exact transform, which TensorFlow's models use."""
    paths, labels = task.files()

    def decoded(path, label):
        data = tf.io.read_file(path)
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(data),
            tf.zeros((1, 0, 4)),
            min_object_covered=0.0,
            aspect_ratio_range=task.ratio,
            area_range=task.scale,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([begin[:2], extent[:2]], axis=0)
        image = tf.io.decode_and_crop_jpeg(data, window, channels=3, dct_method="INTEGER_FAST")
        image = tf.image.resize(image, (task.size, task.size))
        return tf.cast(tf.image.random_flip_left_right(image) + 0.5, tf.uint8), label

    dataset = tf.data.Dataset.from_tensor_slices((paths, tf.constant(labels, tf.int32)))
    dataset = dataset.shuffle(len(paths)).repeat(task.epochs)
    dataset = dataset.map(decoded, num_parallel_calls=2, deterministic=False)
    dataset = dataset.batch(task.batch_rows, drop_remainder=True).prefetch(2)
    for image, label in dataset.as_numpy_iterator():
        yield task.placed(image, label)
