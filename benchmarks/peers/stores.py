"""Which loader starts sooner, and reads faster, from one store: feedline, MosaicML Streaming or LitData?

Each reads the same shuffled rows of 3,072 bytes, and places batches of 1,024 rows on a JAX device. The server
answers after a planted latency. feedline reads one .npy object, the others shards of 64 MB in their own formats.
Each starts with an empty cache on local disk, large enough for all data. Measured are the time from opening to
the first batch, the first epoch, and the next two, which read the cache. Each row begins with its number, to check
that every epoch delivers each row once, except for a last partial batch. MosaicML Streaming shuffles inside a
range of rows, LitData inside a shard; feedline's shuffle is global.

    python benchmarks/peers/stores.py --latency-ms 50 --out stores_peers.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np

READERS = Path(__file__).with_name("readers")
ROW_BYTES, BATCH, EPOCHS, LIMIT_S = 3072, 1024, 3, 900
BUCKET = "bucket"


class Feedline:
    """One .npy object, read by threads."""

    requirements = READERS / "feedline/requirements.txt"

    def prepare(self, rows, folder):
        np.save(f"{folder}/x.npy", rows)

    def open(self, cache, device):
        """A function that is called once an epoch, and returns an iterable of its batches, as JAX arrays."""
        import feedline

        source = feedline.open_source(f"s3://{BUCKET}/x.npy", store=feedline.Store(cache=cache))
        feed = feedline.Feed(source, BATCH, device, epochs=1)
        return lambda: feed


class MosaicML:
    """As readers/mosaic_streaming, with the shards in the store."""

    requirements = READERS / "mosaic_streaming/requirements.txt"

    def __init__(self):
        # Streaming's image datasets import torchvision, whose wheels do not load beside a torch without CUDA
        sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

    def prepare(self, rows, folder):
        from streaming import MDSWriter

        with MDSWriter(out=folder, columns={"row": "bytes"}) as writer:
            for row in rows:
                writer.write({"row": row.tobytes()})

    def open(self, cache, device):
        import jax
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory
        from torch.utils.data import DataLoader

        def joined(samples):
            return np.frombuffer(b"".join(sample["row"] for sample in samples), np.uint8)

        clean_stale_shared_memory()
        dataset = StreamingDataset(remote=f"s3://{BUCKET}", local=cache, shuffle=True, batch_size=BATCH)
        loader = DataLoader(dataset, batch_size=BATCH, drop_last=True, collate_fn=joined)
        return lambda: (jax.device_put(batch.reshape(-1, ROW_BYTES), device) for batch in loader)


class LitData:
    """As readers/litdata, with the chunks in the store."""

    requirements = READERS / "litdata/requirements.txt"

    def prepare(self, rows, folder):
        import torch
        from litdata import TokensLoader
        from litdata.streaming.cache import Cache

        cache = Cache(folder, chunk_bytes="64MB", item_loader=TokensLoader(block_size=ROW_BYTES))
        for number, row in enumerate(rows):
            cache[number] = torch.from_numpy(row)
        cache.done()
        cache.merge()

    def open(self, cache, device):
        import jax
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # LitData has no option for a server without TLS
        blocks = TokensLoader(block_size=ROW_BYTES)
        dataset = StreamingDataset(
            f"s3://{BUCKET}", cache_dir=cache, item_loader=blocks, shuffle=True, drop_last=False
        )
        loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, drop_last=True)
        return lambda: (jax.device_put(batch.numpy(), device) for batch in loader)


ENTRANTS = {"feedline": Feedline, "MosaicML Streaming": MosaicML, "LitData": LitData}


def prepare(entrant, folder, count):
    """Write `count` rows of random bytes that begin with their number, in the entrant's own format."""
    rows = np.random.default_rng(0).integers(0, 256, (count, ROW_BYTES)).astype(np.uint8)
    rows[:, :4] = np.arange(count, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
    entrant.prepare(rows, folder)


def measure(entrant, cache, count):
    """The times of one entrant."""
    import jax

    found = {"epochs_s": []}
    began = time.perf_counter()
    epochs = entrant.open(cache, jax.devices()[0])
    for _ in range(EPOCHS):
        numbers = []
        for batch in epochs():
            jax.block_until_ready(batch)
            found.setdefault("first_batch_s", time.perf_counter() - began)
            numbers.append(np.asarray(batch[:, :4]).copy().view(np.uint32).ravel())
        found["epochs_s"].append(time.perf_counter() - began)
        seen = np.concatenate(numbers)
        assert len(np.unique(seen)) == len(seen) == count // BATCH * BATCH, f"{len(seen)} rows, or some twice"
        began = time.perf_counter()
    return found


def in_its_environment(python, step, *arguments, **variables):
    """Run a step of an entrant in a process of its own. Returns the last line that it prints, parsed as JSON."""
    command = [str(python), __file__, "--step", step, *map(str, arguments)]
    environment = os.environ | variables | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr[-3000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def main():
    sys.path.insert(0, str(Path(__file__).parents[1]))  # entrants' environments lack what these modules import
    from shared.script import save
    from shared.store import served

    from peers.contest import CACHE, folder
    from peers.entrant import interpreter_for

    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--latency-ms", type=float, default=50)
    asked.add_argument("--connection-mb-s", type=float, default=0, help="of each connection; 0: unlimited")
    asked.add_argument("--mib", type=int, default=256)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--environments", type=folder, default=folder(f"{CACHE}/environments"))
    asked.add_argument("--only", nargs="+", choices=ENTRANTS, default=list(ENTRANTS))
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    count, runs = options.mib * (1 << 20) // ROW_BYTES, {name: [] for name in options.only}
    size_mb = count // BATCH * BATCH * ROW_BYTES / 1e6
    variables = dict.fromkeys(("AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "x")
    variables |= {"AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false"}
    pythons = {name: interpreter_for(ENTRANTS[name].requirements, options.environments) for name in options.only}
    with tempfile.TemporaryDirectory() as work:
        for name, python in pythons.items():
            os.mkdir(f"{work}/{name}")
            in_its_environment(python, "prepare", name, f"{work}/{name}", count)
        for number in range(options.rounds):
            for name, python in pythons.items():
                cache = f"{work}/cache-{number}-{name}"
                with served(f"{work}/{name}", options.latency_ms, options.connection_mb_s, BUCKET) as url:
                    variables |= {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url}
                    runs[name].append(in_its_environment(python, "measure", name, cache, count, **variables))
    medians = {
        name: {
            "first_batch_s": statistics.median(run["first_batch_s"] for run in of),
            "first_epoch_mb_s": statistics.median(size_mb / run["epochs_s"][0] for run in of),
            "later_epochs_mb_s": statistics.median(size_mb / s for run in of for s in run["epochs_s"][1:]),
        }
        for name, of in runs.items()
    }
    for name, found in medians.items():
        print(name, found)
    save("stores_peers", options, medians=medians, runs=runs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step, name, path, rows = sys.argv[2:]
        done = {"prepare": prepare, "measure": measure}[step](ENTRANTS[name](), path, int(rows))
        print(json.dumps(done))
    else:
        main()
