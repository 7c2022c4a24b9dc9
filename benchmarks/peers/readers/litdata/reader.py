"""LitData from its chunks on the local disk, which lie in the page cache.

Source: github.com/Lightning-AI/litdata, README: rows of fixed length are stored without a header
for each and read as blocks by TokensLoader. item_shuffle_window=0 fully shuffles the rows inside each
chunk; chunks are shuffled, too, but no row moves to another chunk. The default, windows of 256 rows, and
two workers made no clear difference on two cores.
"""

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming.cache import Cache


def prepare(task):
    """A chunk is 64 MB, the default."""
    cache = Cache(f"{task.folder}/chunks", chunk_bytes="64MB", item_loader=TokensLoader(block_size=task.row_bytes))
    for k, row in enumerate(task.load()):
        cache[k] = torch.from_numpy(row)
    cache.done()
    cache.merge()


def batches(task):
    """Iterate over the loader once per epoch."""
    blocks = TokensLoader(block_size=task.row_bytes)
    dataset = StreamingDataset(f"{task.folder}/chunks", item_loader=blocks, shuffle=True, item_shuffle_window=0)
    for batch in task.again(
        StreamingDataLoader(dataset, batch_size=task.batch_rows, num_workers=0, drop_last=True)
    ):
        yield task.placed(batch.numpy())
