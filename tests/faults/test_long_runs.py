"""Many batches and a thousand feeds: memory, threads, open files and mapped files do not grow."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import grain
import jax
import numpy as np
import pytest

import feedline
from feedline import Feed, Lanes, Reading

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from claims.memory import resident_bytes

pytestmark = pytest.mark.nightly
ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
MIB = 1 << 20
BATCHES = 10_000


def used():
    """Counts that would grow if feeds left something behind."""
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".npy")]
    return {
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")),
        "mapped files of rows": len(mapped),
    }


@pytest.mark.parametrize("prefetch", [0, 2])
def test_many_batches(prefetch):
    """10,000 batches; benchmarks/claims/memory.py takes 100,000."""
    rows = np.arange(1000, dtype=np.int32)
    with Feed(rows, 8, ONE, prefetch=prefetch, reading=Reading(threads=1)) as feed:
        for step, _ in enumerate(feed, start=1):
            if step == BATCHES // 10:
                before, resident, slabs = used(), resident_bytes(), feed.statistics().slabs
            if step == BATCHES:
                break
        assert resident_bytes() - resident < 8 * MIB
        after = used()  # fewer is fine: what earlier tests left may go meanwhile
        assert all(after[kind] <= count for kind, count in before.items()), (before, after)
        assert feed.statistics().slabs <= slabs + 5  # all buffers may be full for the first time
        assert feed.get_state()["step"] == BATCHES


def settled(measure):
    """The first result that `measure` gives twice, half a second apart: threads of a dropped feed end later."""
    deadline = time.monotonic() + 30
    while (found := measure()) != (time.sleep(0.5), measure())[1]:
        assert time.monotonic() < deadline
    return found


def records():
    return grain.MapDataset.range(64).map(lambda i: np.int32(i))


KINDS = {
    "columns": lambda folder: np.arange(64),
    "a mapped file": lambda folder: folder / "x.npy",
    "records": lambda folder: records(),
    "a stream": lambda folder: records().to_iter_dataset(),
    "lanes": lambda folder: Lanes(lambda lane, count: records()[lane::count].to_iter_dataset(), 2),
    "a mixture": lambda folder: feedline.Mixture(
        {"a": {"x": np.arange(64)}, "b": {"x": folder / "x.npy"}}, {"a": 1, "b": 1}, end="first_exhausted"
    ),
}
ENDS = ["closed", "exhausted", "dropped"]


def test_a_thousand_feeds(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(64))
    for number in range(1000):
        kind, end = list(KINDS)[number % len(KINDS)], ENDS[number % 7 % len(ENDS)]
        feed = Feed(KINDS[kind](tmp_path), 8, ONE, epochs=1, prefetch=number % 3)
        next(feed)
        if end == "exhausted":
            list(feed)
        if end != "dropped":
            feed.close()
        del feed
        if number == 99:
            before, resident = settled(used), resident_bytes()
    assert settled(used) == before
    assert resident_bytes() - resident < 8 * MIB
