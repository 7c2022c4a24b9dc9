"""The limit: feedline's decoders alone, on as many threads as cores, into six buffers that are used again.

The files are in this process's memory. Nothing is read, and nothing is placed. See limit/reader.py.
"""

import runpy
from pathlib import Path

from feedline._src.images import ImageDecoder
from feedline._src.sources.decoded import Row

SETTINGS = {"buffers": 6}
AT_ONCE = 2
copied = runpy.run_path(str(Path(__file__).parents[1] / "limit" / "reader.py"))["copied"]


def batches(task, buffers):
    """The buffers as they get full; a buffer is written again when the next one is asked for."""
    decode = ImageDecoder(task.size, "random", True, task.scale, task.ratio, False, "file", "label")
    records = [
        {"file": Path(path).read_bytes(), "label": label} for path, label in zip(*task.files(), strict=True)
    ]

    def fill(indices, out):
        for place, index in enumerate(indices.tolist()):
            into = {"image": out["image"][place], "label": out["label"][place, ...]}
            decode(records[index], into, Row(index, 0, place, index << 20 | place))

    return copied(task, buffers, fill)
