"""Does a feed over a distant store reach the link's rate, start within 2 s, and then run as fast as locally?

A server in a process of its own answers after a planted latency, at a planted rate for each connection. Refuted if
a first epoch reaches less than 0.8 of the rate of obstore alone; if, at a latency of 50 ms and with an empty
cache, the first batch in the middle of an epoch takes 2 s or more; or if an epoch over a full cache is more than
5 % slower than one over local files. Epochs over the cache and over local files alternate, and the median of their
ratios counts, since other programs disturb both.

    python benchmarks/claims/stores.py --latency-ms 50 --out stores.json
"""

import asyncio
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from shared.script import parser, save
from shared.store import served

import feedline
from feedline._src.files.cache import BLOCK_BYTES
from feedline._src.files.fetcher import AT_ONCE

ROW_BYTES = 3072


def rate(source, order, batch_size, epochs=1):
    """MB a second of some epochs."""
    with feedline.Feed(source, batch_size, jax.devices()[0], order=order, epochs=epochs) as feed:
        began, size = time.perf_counter(), 0
        for batch in feed:
            size += batch.nbytes
        return size / (time.perf_counter() - began) / 1e6


def limit(url, size):
    """MB a second of obstore alone: ranges of 2 MiB, as many at once as feedline requests."""
    import obstore
    from obstore.store import from_url

    store = from_url(url, client_options={"allow_http": True})

    async def fetch():
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(start):
            async with slots:
                await obstore.get_range_async(store, "x.npy", start=start, end=min(start + BLOCK_BYTES, size))

        await asyncio.gather(*map(one, range(0, size, BLOCK_BYTES)))

    began = time.perf_counter()
    asyncio.run(fetch())
    return size / (time.perf_counter() - began) / 1e6


def with_fsspec(url, size, rows, batch_size):
    """What fsspec's HTTP file system does, if it and aiohttp are installed: whole blocks, and random rows."""
    if any(importlib.util.find_spec(name) is None for name in ("fsspec", "aiohttp")):
        return {}
    import fsspec

    files, path = fsspec.filesystem("http"), f"{url}/x.npy"

    def took_s(starts, length):
        began = time.perf_counter()
        files.cat_ranges([path] * len(starts), starts, [min(start + length, size) for start in starts])
        return time.perf_counter() - began

    found = {"fsspec_blocks_mb_s": size / took_s(list(range(0, size, BLOCK_BYTES)), BLOCK_BYTES) / 1e6}
    for number, chosen in enumerate(np.random.default_rng(1).integers(0, rows, (2, batch_size)).tolist()):
        found[f"fsspec_batch_{number}_s"] = took_s([128 + ROW_BYTES * row for row in chosen], ROW_BYTES)
    return found


def measured(name, order, url, local, folder, options):
    """Measure the first batch in the middle of an epoch, the first epoch, and cached epochs beside local ones."""
    address, batch_size = f"{url}/x.npy", options.batch
    began = time.perf_counter()
    source = feedline.open_source(address, store=feedline.Store(cache=f"{folder}/{name}"))
    with feedline.Feed(source, batch_size, jax.devices()[0], order=order) as feed:
        feed.seek(0, len(source) // 2)
        jax.block_until_ready(next(feed))
        found = {"first_batch_s": time.perf_counter() - began}
    source = feedline.open_source(address, store=feedline.Store(cache=f"{folder}/{name}-epoch"))
    found["first_epoch_mb_s"] = rate(source, order, batch_size)
    pairs = [[rate(each, order, batch_size, 8) for each in (source, local)] for _ in range(options.rounds)]
    found["cached_mb_s"], found["local_mb_s"] = map(list, zip(*pairs, strict=True))
    found["cached_over_local"] = statistics.median(cached / local for cached, local in pairs)
    return found


def main():
    asked = parser(__doc__)
    asked.add_argument("--latency-ms", type=float, default=50)
    asked.add_argument("--connection-mb-s", type=float, default=0, help="of each connection; 0: unlimited")
    asked.add_argument("--mib", type=int, default=256)
    asked.add_argument("--batch", type=int, default=1024)
    asked.add_argument("--rounds", type=int, default=5)
    options = asked.parse_args()
    rows = options.mib * (1 << 20) // ROW_BYTES
    orders = {
        "global": feedline.Order(),
        "blocks": feedline.Order(shuffle=feedline.Blocks(rows=2048, window=8)),
    }
    with tempfile.TemporaryDirectory() as folder:
        objects, local = f"{folder}/objects", f"{folder}/objects/x.npy"
        os.mkdir(objects)
        np.save(local, np.random.default_rng(0).integers(0, 256, (rows, ROW_BYTES)).astype(np.uint8))
        size = os.path.getsize(local)
        with served(objects, options.latency_ms, options.connection_mb_s) as url:
            feedline.open_source(f"{url}/x.npy", store=feedline.Store(cache=f"{folder}/warm"))  # imports, untimed
            result = {"limit_mb_s": limit(url, size), **with_fsspec(url, size, rows, options.batch)}
            for name, order in orders.items():
                result[name] = measured(name, order, url, local, folder, options)
    for name, value in result.items():
        print(name, value)
    save("stores", options, results=result)


if __name__ == "__main__":
    main()
