"""The consumer of all peers: on request, measures one peer's reader, or checks its batches.

`python consume.py READER.py` runs in the peer's own environment. The reader is a file with

    def batches(task) -> Iterator                       # batches as task.spec says, placed by task.sharding
    def prepare(task) -> None                           # optional: converts the rows to the peer's own format
    AT_ONCE: int                                        # optional: how many batches arrive together, by default 1

The task is a `Rows` of tasks/rows_task.py, or an `Images` of tasks/images_task.py.

Each line on standard input is one request in JSON, each line on standard output its answer. The peer's own
output goes to standard error. An error ends the process.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import itertools
import json
import sys
import time
from pathlib import Path

import jax

sys.path.append(str(Path(__file__).with_name("tasks")))  # worker processes inherit it
from images_task import Images
from rows_task import Rows

TASKS = {"rows": Rows, "images": Images}


def measure(reader, task, warm_up_s, seconds):
    """Rows and seconds of one round, after a warm-up that also uses up batches read ahead."""
    at_once = getattr(reader, "AT_ONCE", 1)
    batches = reader.batches(task)
    first = next(batches)
    jax.tree.map(functools.partial(_check_leaf, task.sharding), task.spec, first)
    del first
    draw(batches, warm_up_s, at_least=at_once)
    count, elapsed = draw(batches, seconds, at_least=max(2, at_once))
    batches.close()
    return {"rows": count * task.batch_rows, "seconds": elapsed, "resident_bytes": resident_bytes()}


def _check_leaf(sharding, spec, leaf):
    if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
        raise ValueError(f"a batch must be {spec.dtype}{list(spec.shape)}, got {leaf.dtype}{leaf.shape}")
    if isinstance(leaf, jax.Array) and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        raise ValueError(f"a batch must lie on all devices as {sharding}, got {leaf.sharding}")


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


def check(reader, task, limit):
    """Compare the first `limit` batches (None: a whole epoch) with the data."""
    batches = reader.batches(dataclasses.replace(task, epochs=1))
    found = task.compare(itertools.islice(batches, limit), limit)
    batches.close()
    return found


def resident_bytes():
    """The resident memory of this process, counted page by page: /proc/self/status lags behind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


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
    do = request.pop("do")
    if do == "describe":
        return {"versions": versions()}
    fields = request.pop("task")
    task = TASKS[fields.pop("kind")](**fields)
    return {"prepare": prepare, "check": check, "measure": measure}[do](reader, task, **request)


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
