"""MosaicML Streaming from MDS shards on the local disk, which lie in the page cache.

Sources: docs.mosaicml.com/projects/streaming, "Performance Tuning" and "Shuffling" (the default
algorithm, py1e, shuffles inside a range of samples, not globally). The library opens the shard's file for each
sample. Two workers were no clear gain on two cores.
"""

import sys
import types

import numpy as np
from torch.utils.data import DataLoader

# Streaming's image datasets import torchvision, whose wheels do not load beside a torch without CUDA
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

from streaming import MDSWriter, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def prepare(task):
    """A shard is 64 MiB, the default; a sample is one row."""
    with MDSWriter(out=f"{task.folder}/mds", columns={"row": "bytes"}) as writer:
        for row in task.load():
            writer.write({"row": row.tobytes()})


def batches(task):
    """Rows arrive as bytes and are joined to a batch in one call, which avoids a tensor for each row."""
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=f"{task.folder}/mds", shuffle=True, batch_size=task.batch_rows)
    for batch in task.again(DataLoader(dataset, task.batch_rows, drop_last=True, collate_fn=_joined)):
        yield task.placed(batch.reshape(-1, task.row_bytes))


def _joined(samples):
    return np.frombuffer(b"".join(sample["row"] for sample in samples), np.uint8)
