"""Does a feed over a store far away reach the link's rate, start in under 2 s, and then run as from local files?

A server in a process of its own answers after a planted latency, at a planted rate for each connection. Refuted
if a first epoch takes longer than 1 / 0.8 of what obstore alone needs, if the first batch in the middle of an
epoch, with an empty cache, takes 2 s or more at 50 ms, or if an epoch over a full cache is more than 5 % slower
than one over local files. Epochs over the cache and over local files alternate; the median of their ratios counts,
since other programs disturb both.

    python benchmarks/claims/stores.py --latency-ms 50 --out results/stores.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SERVER = Path(__file__).parents[2] / "tests" / "stores"


def serve(path: str, latency_s: float, bytes_s: float) -> None:
    """Serve a file until the standard input ends."""
    sys.path.insert(0, str(SERVER))
    from store_server import etag, serving

    with serving({"/x.npy": Path(path).read_bytes()}) as store:
        etag(store.objects["/x.npy"])  # computed once
        store.latency_s, store.bytes_s = latency_s, bytes_s or None
        print(store.url, flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def server(path: str, latency_s: float, bytes_s: float):
    """The address of a server in another process."""
    arguments = [sys.executable, __file__, "--serve", path, str(latency_s), str(bytes_s)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def rate(source, order, batch_size: int, epochs: int = 1) -> float:
    """Bytes a second of some epochs."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import feedline

    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
    feed = feedline.Feed(source, batch_size, sharding, order=order, epochs=epochs)
    began, size = time.perf_counter(), 0
    for batch in feed:
        size += batch.nbytes
    feed.close()
    return size / (time.perf_counter() - began)


def limit(url: str, size: int) -> float:
    """Bytes a second of obstore alone: ranges of 2 MiB, as many at once as feedline asks for."""
    import asyncio

    import obstore
    from obstore.store import from_url

    from feedline._src.stores.fetcher import AT_ONCE
    from feedline._src.stores.residency import BLOCK_BYTES

    store = from_url(url, client_options={"allow_http": True})

    async def fetch() -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(start: int) -> None:
            async with slots:
                await obstore.get_range_async(store, "x.npy", start=start, end=min(start + BLOCK_BYTES, size))

        await asyncio.gather(*map(one, range(0, size, BLOCK_BYTES)))

    began = time.perf_counter()
    asyncio.run(fetch())
    return size / (time.perf_counter() - began)


def with_fsspec(url: str, size: int, rows: int, batch_size: int) -> dict[str, float]:
    """What fsspec's HTTP file system does, if it and aiohttp are installed: whole blocks, and random rows."""
    if any(importlib.util.find_spec(name) is None for name in ("fsspec", "aiohttp")):
        return {}
    import fsspec
    import numpy as np

    from feedline._src.stores.residency import BLOCK_BYTES

    files, path, found = fsspec.filesystem("http"), f"{url}/x.npy", {}
    starts = list(range(0, size, BLOCK_BYTES))
    began = time.perf_counter()
    files.cat_ranges([path] * len(starts), starts, [min(start + BLOCK_BYTES, size) for start in starts])
    found["fsspec_blocks_mb_s"] = size / (time.perf_counter() - began) / 1e6
    chosen = (128 + 3072 * np.random.default_rng(1).integers(0, rows, (2, batch_size))).tolist()
    for number, starts in enumerate(chosen):
        began = time.perf_counter()
        files.cat_ranges([path] * batch_size, starts, [start + 3072 for start in starts])
        found[f"fsspec_batch_{number}_s"] = time.perf_counter() - began
    return found


def measure(arguments: argparse.Namespace) -> dict:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import feedline
    from feedline._src.stores.fetcher import fetcher

    result: dict = {"platform": platform.platform(), "cores": os.cpu_count(), **vars(arguments)}
    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
    with tempfile.TemporaryDirectory() as folder:
        local = f"{folder}/x.npy"
        rows = arguments.mib * (1 << 20) // 3072
        np.save(local, np.random.default_rng(0).integers(0, 256, (rows, 3072)).astype(np.uint8))
        latency_s, link = arguments.latency_ms / 1e3, arguments.connection_mb_s * 1e6
        with server(local, latency_s, link) as url:
            blocked = feedline.Order(shuffle=feedline.Blocks(rows=2048, window=8))
            feedline.open_source(f"{url}/x.npy", store=feedline.Store(cache=f"{folder}/warm"))  # imports
            result["limit_mb_s"] = limit(url, os.path.getsize(local)) / 1e6
            result |= with_fsspec(url, os.path.getsize(local), rows, arguments.batch)
            for name, order in (("global", feedline.Order()), ("blocks", blocked)):
                store = feedline.Store(cache=f"{folder}/{name}")
                began = time.perf_counter()
                source = feedline.open_source(f"{url}/x.npy", store=store)
                with feedline.Feed(source, arguments.batch, sharding, order=order) as feed:
                    feed.seek(0, rows // 2)
                    jax.block_until_ready(next(feed))
                    result[f"{name}_first_batch_s"] = time.perf_counter() - began
                store = feedline.Store(cache=f"{folder}/{name}-epoch")
                source = feedline.open_source(f"{url}/x.npy", store=store)
                result[f"{name}_first_epoch_mb_s"] = rate(source, order, arguments.batch) / 1e6
                speeds: dict = {"cached": [], "local": []}
                for _ in range(arguments.rounds):
                    speeds["cached"].append(rate(source, order, arguments.batch, 8) / 1e6)
                    speeds["local"].append(rate(local, order, arguments.batch, 8) / 1e6)
                result |= {f"{name}_{kind}_mb_s": values for kind, values in speeds.items()}
                result[f"{name}_cached_over_local"] = statistics.median(
                    cached / local for cached, local in zip(speeds["cached"], speeds["local"], strict=True)
                )
    result["counts"] = vars(fetcher().counts)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--connection-mb-s", type=float, default=0, help="of each connection; 0: unlimited")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    result = measure(arguments)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
