"""SPDL's own image functions, which use FFmpeg, in a pipeline of threads.

Sources: facebookresearch.github.io/spdl/0.8.0, "Building and Running Pipeline", and spdl.io.load_image_batch. As
in that function, images are demuxed and decoded one by one, and converted to one buffer; here, each image gets a
crop of its own. FFmpeg's libraries (4 to 9) must be installed: pip does not install them.
"""

import math
import random

import numpy as np
import spdl.io
from spdl.pipeline import PipelineBuilder

THREADS, AT_ONCE_DECODED = 2, 32


def batches(task):
    """Yield placed batches. Each call in the pipeline decodes 32 images."""
    paths, labels = task.files()
    labels = np.array(labels, np.int32)

    def decode(indices):
        frames = []
        for index in indices:
            packets = spdl.io.demux_image(paths[index])
            steps = crop(packets.width, packets.height, task)
            frames.append(spdl.io.decode_packets(packets, filter_desc=steps))
        return spdl.io.to_numpy(spdl.io.convert_frames(frames)), labels[indices]

    def join(parts):
        return task.placed(*(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))

    def chunks():
        for order in task.orders():
            yield from order[: len(order) // at_once * at_once].reshape(-1, at_once)

    at_once = math.gcd(AT_ONCE_DECODED, task.batch_rows)
    builder = PipelineBuilder().add_source(chunks()).pipe(decode, concurrency=THREADS)
    builder = builder.aggregate(task.batch_rows // at_once, drop_last=True).pipe(join).add_sink(2)
    pipeline = builder.build(num_threads=THREADS + 1)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def crop(width, height, task):
    """FFmpeg's filters for a random crop, which is resized, and mirrored half of the time."""
    mirror = "hflip," if random.random() < 0.5 else ""
    for _ in range(10):
        area = width * height * random.uniform(*task.scale)
        shape = math.exp(random.uniform(*map(math.log, task.ratio)))
        wide, tall = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < tall <= height:
            break
    else:
        wide, tall = min(width, int(height * task.ratio[1])), min(height, int(width / task.ratio[0]))
    left, top = random.randint(0, width - wide), random.randint(0, height - tall)
    return (
        f"crop={wide}:{tall}:{left}:{top}:exact=1,scale={task.size}:{task.size}:flags=bilinear,"
        f"{mirror}format=pix_fmts=rgb24"
    )
