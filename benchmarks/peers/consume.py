"""The consumer that all peers share: measures one peer's reader and checks its rows, as lines of JSON ask.

`python consume.py READER.py` runs in the peer's own environment. The reader is a file with

    SETTINGS: dict                                      # the keyword arguments of batches
    def batches(task, **settings) -> Iterator           # uint8[batch_rows, row_bytes], placed by task.sharding
    def prepare(task) -> None                           # optional: converts the rows to the peer's own format
    AT_ONCE: int                                        # optional: how many batches arrive together, by default 1
    SWEEP: list[dict]                                   # optional: settings that peers_sweep.py compares

Each line on standard input is one request, each line on standard output its answer; whatever the
peer itself prints goes to standard error. An error ends the process.
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
    """What to read, and where to put it.

    Attributes:
      file: .npy with uint8[bytes], the same for every peer.
      row_bytes: bytes in a row; rows follow each other without gaps.
      batch_rows: rows in a batch. Only whole batches of the file count.
      threads: cores of this machine, at most 16.
      folder: where `prepare` puts the peer's own format.
      epochs: passes over the rows, None: endless.
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
        """uint8[rows, row_bytes], in memory of this process; or the file mapped into it."""
        flat = np.load(self.file, mmap_mode="r" if mapped else None)
        rows = len(flat) // (self.row_bytes * self.batch_rows) * self.batch_rows
        return flat[: rows * self.row_bytes].reshape(rows, self.row_bytes)

    def records(self):
        """The rows as a sequence that can be sent to other processes."""
        return Records(self)

    def orders(self, seed=0):
        """A permutation of all rows for each epoch, as NumPy makes it."""
        rows, generator, epoch = len(self.load(mapped=True)), np.random.default_rng(seed), 0
        while self.epochs is None or epoch < self.epochs:
            yield generator.permutation(rows)
            epoch += 1


class Records:
    """The rows one by one, from the mapped file: worker processes open it again instead of copying an array."""

    def __init__(self, task):
        self.task, self.rows = task, task.load(mapped=True)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __reduce__(self):
        return Records, (self.task,)


def measure(reader, task, settings, warm_up_s, seconds):
    """Rows and seconds of one round, after a warm-up that also empties what was read ahead."""
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
    """Take batches until both are reached: how many, in how many seconds. Two are alive at the most."""
    count, started = 0, time.perf_counter()
    while count < at_least or time.perf_counter() - started < seconds:
        held = jax.block_until_ready(next(batches))  # the one before is let go only now
        count += 1
    del held
    return count, time.perf_counter() - started


def check(reader, task, settings, limit):
    """Compare the first `limit` batches (None: a whole epoch) with the rows themselves.

    A row is found by its first eight bytes, which are random, then compared whole. `jump` tells how
    well rows are shuffled: the mean distance in the file of rows that follow each other, divided by
    that of a uniform shuffle (a third of all rows).
    """
    rows = task.load()
    heads = np.ascontiguousarray(rows[:, :8]).view(np.uint64).ravel()
    by_head = np.argsort(heads)
    sorted_heads = heads[by_head]
    wrong, indices = 0, []
    batches = reader.batches(dataclasses.replace(task, epochs=1), **settings)
    for batch in batches:
        got = np.asarray(batch)
        place = np.searchsorted(sorted_heads, np.ascontiguousarray(got[:, :8]).view(np.uint64).ravel())
        index = by_head[np.minimum(place, len(rows) - 1)]
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
    """Do what one request asks."""
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
    """Load the reader, then answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.append(str(Path(path).parent))  # worker processes get it too, and find the reader there
    reader = importlib.import_module("reader")
    for line in sys.stdin:
        print(json.dumps(answer(reader, json.loads(line))), file=answers, flush=True)
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1])
