"""Which loader starts sooner, and reads faster, from one store: feedline, MosaicML Streaming or LitData?

Each gets the same rows of 3,072 bytes, shuffled, in batches of 1,024 that lie on a JAX device, from the same
server, which answers after a planted latency: feedline as one .npy object, each of the others in shards of its
own format and size (64 MB). Each starts with an empty cache on local disk that holds all data. Measured: the
time from opening to the first batch, the first epoch, and the next two, which read the cache. A row begins with
its number: every epoch must deliver each row once, but those of a last partial batch. MosaicML Streaming
shuffles inside a range of rows, LitData inside a shard; feedline's shuffle is global.

    python benchmarks/peers/stores.py --environments envs --latency-ms 50 --out stores_peers.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

READERS = Path(__file__).with_name("readers")
ROW_BYTES, BATCH, EPOCHS = 3072, 1024, 3
BUCKET = "bucket"
LIMIT_S = 900
Epochs = Callable[[], Iterable[Any]]
"""Called once an epoch: its batches, as arrays of JAX."""


def load(count: int) -> np.ndarray:
    """`count` rows of random bytes that begin with their number."""
    rows = np.random.default_rng(0).integers(0, 256, (count, ROW_BYTES)).astype(np.uint8)
    rows[:, :4] = np.arange(count, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
    return rows


class Feedline:
    """One .npy object, read by threads."""

    def prepare(self, rows: np.ndarray, folder: str) -> None:
        np.save(f"{folder}/x.npy", rows)

    def open(self, cache: str, sharding: Any) -> Epochs:
        import feedline

        source = feedline.open_source(f"s3://{BUCKET}/x.npy", store=feedline.Store(cache=cache))
        feed = feedline.Feed(source, BATCH, sharding, epochs=1)
        return lambda: feed


class MosaicML:
    """As readers/mosaic_streaming, with the shards in the store."""

    def __init__(self) -> None:
        # its image datasets import torchvision, whose published wheels do not load beside a torch without CUDA
        sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

    def prepare(self, rows: np.ndarray, folder: str) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=folder, columns={"row": "bytes"}) as writer:
            for row in rows:
                writer.write({"row": row.tobytes()})

    def open(self, cache: str, sharding: Any) -> Epochs:
        import jax
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory
        from torch.utils.data import DataLoader

        clean_stale_shared_memory()
        dataset = StreamingDataset(remote=f"s3://{BUCKET}", local=cache, shuffle=True, batch_size=BATCH)
        loader = DataLoader(
            dataset,
            batch_size=BATCH,
            drop_last=True,
            collate_fn=lambda samples: np.frombuffer(b"".join(sample["row"] for sample in samples), np.uint8),
        )
        return lambda: (jax.device_put(batch.reshape(-1, ROW_BYTES), sharding) for batch in loader)


class LitData:
    """As readers/litdata, with the chunks in the store."""

    def prepare(self, rows: np.ndarray, folder: str) -> None:
        import torch
        from litdata import TokensLoader
        from litdata.streaming.cache import Cache

        cache = Cache(folder, chunk_bytes="64MB", item_loader=TokensLoader(block_size=ROW_BYTES))
        for number, row in enumerate(rows):
            cache[number] = torch.from_numpy(row)
        cache.done()
        cache.merge()

    def open(self, cache: str, sharding: Any) -> Epochs:
        import jax
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a server without TLS
        dataset = StreamingDataset(
            f"s3://{BUCKET}",
            cache_dir=cache,
            item_loader=TokensLoader(block_size=ROW_BYTES),
            shuffle=True,
            drop_last=False,
        )
        loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, drop_last=True)
        return lambda: (jax.device_put(batch.numpy(), sharding) for batch in loader)


ENTRANTS = {
    "feedline": (Feedline, READERS / "feedline/requirements.txt"),
    "MosaicML Streaming": (MosaicML, READERS / "mosaic_streaming/requirements.txt"),
    "LitData": (LitData, READERS / "litdata/requirements.txt"),
}


def measure(entrant: Any, cache: str, count: int) -> dict[str, Any]:
    """The times of one entrant, in its own process."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
    found: dict[str, Any] = {"epochs_s": []}
    began = time.perf_counter()
    epochs = entrant.open(cache, sharding)
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


def in_its_environment(python: Path, *arguments: object, **variables: str) -> Any:
    """What a step of an entrant printed as its last line, as JSON."""
    command = [str(python), __file__, *map(str, arguments)]
    environment = os.environ | variables | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr[-3000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--connection-mb-s", type=float, default=0, help="of each connection; 0: unlimited")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--environments", type=Path, required=True, help="folder for the environments of the others"
    )
    parser.add_argument("--out")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from shared.store import served

    from peers.entrant import interpreter_for  # not in the environments of the others

    count = given.mib * (1 << 20) // ROW_BYTES
    found: dict[str, list[Any]] = {name: [] for name in ENTRANTS}
    with tempfile.TemporaryDirectory() as folder:
        pythons = {name: interpreter_for(path, given.environments) for name, (_, path) in ENTRANTS.items()}
        for name, python in pythons.items():
            os.mkdir(f"{folder}/{name}")
            in_its_environment(python, "prepare", name, f"{folder}/{name}", count)
        for number in range(given.rounds):
            for name, python in pythons.items():
                cache = f"{folder}/cache-{number}-{name}"
                with served(f"{folder}/{name}", given.latency_ms, given.connection_mb_s, BUCKET) as url:
                    found[name].append(
                        in_its_environment(
                            python, "measure", name, cache, count,
                            AWS_ENDPOINT_URL=url, S3_ENDPOINT_URL=url, AWS_ALLOW_HTTP="true", AWS_REGION="x",
                            AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x",
                            AWS_VIRTUAL_HOSTED_STYLE_REQUEST="false",
                        )
                    )  # fmt: skip
    size = count // BATCH * BATCH * ROW_BYTES
    table = {
        name: {
            "first_batch_s": statistics.median(run["first_batch_s"] for run in runs),
            "first_epoch_mb_s": statistics.median(size / run["epochs_s"][0] for run in runs) / 1e6,
            "later_epochs_mb_s": statistics.median(size / s for run in runs for s in run["epochs_s"][1:]) / 1e6,
        }
        for name, runs in found.items()
    }
    result = {"platform": platform.platform(), "cores": os.cpu_count(), "medians": table, "runs": found}
    text = json.dumps(
        result | {k: v for k, v in vars(given).items() if k not in ("environments", "out")}, indent=1
    )
    print(json.dumps(table, indent=1))
    if given.out:
        Path(given.out).write_text(text + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prepare", name, folder, count]:
            ENTRANTS[name][0]().prepare(load(int(count)), folder)
            print("{}")
        case ["measure", name, cache, count]:
            print(json.dumps(measure(ENTRANTS[name][0](), cache, int(count))))
        case _:
            main()
