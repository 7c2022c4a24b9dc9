"""The consumer of all peers: measures one peer's reader, or checks its rows, at each request.

`python consume.py READER.py` runs in the peer's own environment. The reader is a file with

    SETTINGS: dict                                      # the keyword arguments of batches
    def batches(task, **settings) -> Iterator           # uint8[batch_rows, row_bytes], placed by task.sharding
    def prepare(task) -> None                           # optional: converts the rows to the peer's own format
    AT_ONCE: int                                        # optional: how many batches arrive together, by default 1
    SWEEP: list[dict]                                   # optional: settings that peers_sweep.py compares

Each line on standard input is one request in JSON, each line on standard output its answer. The peer's own
output goes to standard error. An error ends the process.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import dataclasses
import gc
import importlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Task:
    """The rows to read, and the sharding of their batches.

    Attributes:
      file: .npy with uint8[bytes], the same for every peer.
      row_bytes: bytes in a row; rows follow each other without gaps.
      batch_rows: rows in a batch. A last partial batch of the file is left out.
      threads: cores of this machine, at most 16.
      folder: where `prepare` writes the data in the peer's own format.
      epochs: how often the rows are read; None: endless.
    """

    file: str
    row_bytes: int
    batch_rows: int
    threads: int
    folder: str
    epochs: int | None = None

    @property
    def sharding(self):
        """Rows over all eight devices."""
        return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    def load(self, mapped=False):
        """uint8[rows, row_bytes] in this process's memory, or mapped from the file."""
        flat = np.load(self.file, mmap_mode="r" if mapped else None)
        rows = len(flat) // (self.row_bytes * self.batch_rows) * self.batch_rows
        return flat[: rows * self.row_bytes].reshape(rows, self.row_bytes)

    def records(self):
        """The rows as a sequence that can be pickled."""
        return Records(self)

    def orders(self, seed=0):
        """A random permutation of all rows for each epoch."""
        rows, generator, epoch = len(self.load(mapped=True)), np.random.default_rng(seed), 0
        while self.epochs is None or epoch < self.epochs:
            yield generator.permutation(rows)
            epoch += 1


class Records:
    """The rows of the mapped file as a sequence. When unpickled it opens the file again, so no array is copied."""

    def __init__(self, task):
        self.task, self.rows = task, task.load(mapped=True)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __reduce__(self):
        return Records, (self.task,)


def measure(reader, task, settings, warm_up_s, seconds):
    """Rows and seconds of one round, after a warm-up that also uses up batches read ahead."""
    at_once = getattr(reader, "AT_ONCE", 1)
    batches = reader.batches(task, **settings)
    first = next(batches)
    if (first.shape, first.dtype) != ((task.batch_rows, task.row_bytes), np.uint8):
        raise ValueError(
            f"a batch must be uint8[{task.batch_rows}, {task.row_bytes}], got {first.dtype}{first.shape}"
        )
    if isinstance(first, jax.Array) and not first.sharding.is_equivalent_to(task.sharding, 2):
        raise ValueError(f"a batch must lie on all devices as {task.sharding}, got {first.sharding}")
    draw(batches, warm_up_s, at_least=at_once)
    count, elapsed = draw(batches, seconds, at_least=max(2, at_once))
    batches.close()
    return {"rows": count * task.batch_rows, "seconds": elapsed}


def draw(batches, seconds, at_least):
    """Take at least `at_least` batches, for at least `seconds` seconds. Returns their number and the time.

    At most two batches are alive.
    """
    count, started = 0, time.perf_counter()
    while count < at_least or time.perf_counter() - started < seconds:
        batch = jax.block_until_ready(next(batches))  # the previous batch is released now
        count += 1
    del batch
    return count, time.perf_counter() - started


def check(reader, task, settings, limit):
    """Compare the first `limit` batches (None: a whole epoch) with the rows themselves.

    A row is found by its first eight bytes, which are random, and compared as a whole. `jump` measures the
    shuffle: the mean distance in the file of successive rows, divided by that of a uniform shuffle (a third of
    all rows).
    """
    rows = task.load()
    heads = np.ascontiguousarray(rows[:, :8]).view(np.uint64).ravel()
    by_head = np.argsort(heads)
    sorted_heads = heads[by_head]
    wrong, indices = 0, []
    batches = reader.batches(dataclasses.replace(task, epochs=1), **settings)
    for batch in batches:
        got = np.asarray(batch)
        found = np.searchsorted(sorted_heads, np.ascontiguousarray(got[:, :8]).view(np.uint64).ravel())
        index = by_head[np.minimum(found, len(rows) - 1)]
        wrong += int((rows[index] != got).any(axis=1).sum())
        indices.append(index)
        if len(indices) == limit:
            break
    batches.close()
    index = np.concatenate(indices)
    expected = len(rows) if limit is None else min(len(rows), limit * task.batch_rows)
    return {
        "rows": len(index),
        "wrong": wrong,
        "repeated": len(index) - len(np.unique(index)),
        "missing": expected - len(np.unique(index)),
        "jump": float(np.abs(np.diff(index)).mean() / (len(rows) / 3)),
    }


def prepare(reader, task):
    """Convert the rows to the peer's own format, once."""
    done = Path(task.folder) / "done"
    if not hasattr(reader, "prepare") or done.exists():
        return {"seconds": 0.0}
    Path(task.folder).mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    reader.prepare(task)
    done.touch()
    return {"seconds": time.perf_counter() - started}


def versions():
    """{distribution: version} of everything imported so far."""
    imported = {name.partition(".")[0] for name in sys.modules}
    owners = importlib.metadata.packages_distributions()
    names = {owner for module in imported & owners.keys() for owner in owners[module]}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def answer(reader, request):
    """The answer to one request."""
    settings = reader.SETTINGS | request.get("settings", {})
    if request["do"] == "describe":
        return {"settings": settings, "sweep": getattr(reader, "SWEEP", [{}]), "versions": versions()}
    task = Task(**request["task"])
    match request["do"]:
        case "prepare":
            return prepare(reader, task)
        case "check":
            return check(reader, task, settings, request["limit"])
        case "measure":
            return measure(reader, task, settings, request["warm_up_s"], request["seconds"])
    raise ValueError(f"a request is one of describe, prepare, check, measure, got {request['do']!r}")


def main(path):
    """Load the reader, and answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.append(str(Path(path).parent))  # worker processes inherit it, so that they can import the reader
    reader = importlib.import_module("reader")
    for line in sys.stdin:
        print(json.dumps(answer(reader, json.loads(line))), file=answers, flush=True)
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1])
