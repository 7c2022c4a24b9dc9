"""Does a feed whose settings are "auto" become as fast as the best settings that an exhaustive search finds?

Six loads, each with another bottleneck. All settings of a grid are measured once; the best three of them are then
measured again in turns with a feed that has found its own settings, and whose search began with the defaults. Each
sample is the mean time of a step. The slow disk and the slow transfer sleep, as does the loop, so that loads stay
apart on any machine; the two decoders compute.

    python benchmarks/claims/tuning.py --out tuning.json    # eight minutes
    python benchmarks/claims/tuning.py --loads "slow disk"

Refuted by a load on which the median of "auto" is more than 1.1 times as long as that of the best settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

import feedline
from feedline._src.options import Settings
from feedline._src.placement.place import Placement

BATCH, WIDTH = 64, 4096
ROWS = 1 << 13
THREADS, ROOM, WORKERS = (1, 2, 4, 8, 16), (2, 8), (1, 2, 4)
AGAIN = 3
"""Of the grid: settings that are measured again."""


class SlowDisk:
    """Rows of which 64 take 40 ms to read, from storage that serves 16 reads at a time."""

    spec = {"x": jax.ShapeDtypeStruct((WIDTH,), np.uint8)}  # noqa: RUF012
    identity = {"kind": "slow disk"}  # noqa: RUF012
    picklable = False
    together = threading.Semaphore(16)

    def __len__(self):
        return ROWS

    def read(self, rows, out):
        with self.together:
            time.sleep(0.040 * len(rows) / BATCH)
        out["x"][...] = 1

    def close(self):
        pass


def holds_the_lock(batch, rows):
    """Python code: some 15 ms a batch."""
    for _ in range(len(rows.index)):
        sum(range(12_000))
    return batch


def frees_the_lock(batch, rows):
    """Hashes, which let other threads run: some 15 ms a batch."""
    data = np.ascontiguousarray(batch["x"]).tobytes()
    for _ in range(24):
        hashlib.blake2b(data).digest()
    return batch


def wide_rows(folder):
    return {"x": np.ones((1 << 10, 1 << 16), np.uint8)}  # batches of 4 MB


def in_memory(folder):
    return {"x": np.ones((ROWS, WIDTH), np.uint8)}


def on_disk(folder):
    path = os.path.join(folder, "x.npy")
    if not os.path.exists(path):
        np.save(path, np.ones((ROWS, WIDTH), np.uint8))
    return {"x": path}


# name: source, transform, seconds of placing, seconds of the loop
LOADS = {
    "memory": (wide_rows, None, 0.0, 0.0),
    "slow disk": (lambda folder: SlowDisk(), None, 0.0, 0.004),
    "GIL-bound decode": (on_disk, holds_the_lock, 0.0, 0.004),
    "GIL-free decode": (on_disk, frees_the_lock, 0.0, 0.004),
    "slow transfer": (in_memory, None, 0.020, 0.004),
    "compute-bound": (in_memory, None, 0.0, 0.010),
}


@contextlib.contextmanager
def placing_takes(seconds):
    """As a slow link does: the call returns when the batch has arrived."""
    whole = Placement.place

    def slow(self, leaves):
        time.sleep(seconds)
        return whole(self, leaves)

    if seconds:
        Placement.place = slow
    try:
        yield
    finally:
        Placement.place = whole


def feed_of(load, folder, settings):
    """A feed with these settings; None: it finds them."""
    source, transform, _, _ = LOADS[load]
    chosen = dict.fromkeys(Settings._fields, "auto") if settings is None else settings._asdict()
    prefetch = chosen.pop("prefetch")
    device = jax.devices()[0]
    return feedline.Feed(
        source(folder), BATCH, device, transform=transform, reading=feedline.Reading(**chosen), prefetch=prefetch
    )


def step_s(feed, load, seconds):
    """The mean time of a step, after what was read ahead has been taken."""
    loop_s = LOADS[load][3]

    def step():
        next(feed)
        if loop_s:
            time.sleep(loop_s)

    for _ in range(feed._stages.ahead + 2):
        step()
    began, steps = time.perf_counter(), 0
    while steps < 16 or time.perf_counter() < began + seconds:
        step()
        steps += 1
    return (time.perf_counter() - began) / steps


def grid(load, quick):
    """The settings of the exhaustive search. Workers where Python holds the interpreter's lock."""
    threads, room, workers = (THREADS, ROOM, WORKERS) if not quick else ((1, 4), (2,), (2,))
    found = [
        Settings(n, 0, buffer, prefetch) for n in threads for buffer, prefetch in itertools.product(room, room)
    ]
    if load == "GIL-bound decode":
        found += [Settings(0, n, buffer, room[0]) for n in workers for buffer in room]
    return found


def searched(load, folder, options):
    """A feed that has found its settings, and the seconds and steps which that took."""
    feed = feed_of(load, folder, None)
    began, loop_s, steps = time.perf_counter(), LOADS[load][3], 0
    while not feed._observing.tuner.settled and time.perf_counter() < began + options.search_s:
        next(feed)
        steps += 1
        if loop_s:
            time.sleep(loop_s)
    return feed, time.perf_counter() - began, steps


def measured(load, folder, options):
    with placing_takes(LOADS[load][2]):
        steps_s = {}
        for settings in grid(load, options.quick):
            with feed_of(load, folder, settings) as feed:
                steps_s[settings] = step_s(feed, load, options.seconds)
        best = sorted(steps_s, key=steps_s.get)[:AGAIN]
        auto, search_s, steps = searched(load, folder, options)
        samples = {"auto": [], **{str(tuple(each)): [] for each in best}}
        with auto:
            for _ in range(options.rounds):
                samples["auto"].append(step_s(auto, load, options.seconds))
                for settings in best:
                    with feed_of(load, folder, settings) as feed:
                        samples[str(tuple(settings))].append(step_s(feed, load, options.seconds))
            chosen, tuning = auto._stages.settings, auto._observing.tuner
            history, settled = list(tuning.history), tuning.settled
    medians = {name: statistics.median(values) for name, values in samples.items()}
    best_name = min((name for name in medians if name != "auto"), key=medians.get)
    return {
        "ratio": medians["auto"] / medians[best_name],
        "auto_ms": medians["auto"] * 1e3,
        "best_ms": medians[best_name] * 1e3,
        "defaults_ms": 1e3 * steps_s[min(steps_s, key=lambda each: (each[1:] != (0, 2, 2), abs(each[0] - 2)))],
        "auto": chosen._asdict(),
        "best": best_name,
        "settled": settled,
        "search_s": search_s,
        "search_steps": steps,
        "history": history,
        "grid_ms": {str(tuple(each)): seconds * 1e3 for each, seconds in steps_s.items()},
        "samples_ms": {name: [value * 1e3 for value in values] for name, values in samples.items()},
    }


def main():
    asked = parser(__doc__)
    asked.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--seconds", type=float, default=1.0, help="of a sample")
    asked.add_argument("--search-s", type=float, default=45.0, help="that a search may take")
    asked.add_argument("--quick", action="store_true", help="a small grid, one round, short samples")
    options = asked.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.search_s = 1, 0.1, 4.0
    loads = {}
    print("| load | auto ÷ best | auto | best of the grid | default | settings found | search |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for load in options.loads:
            found = loads[load] = measured(load, folder, options)
            settings = ", ".join(f"{name} {value}" for name, value in found["auto"].items())
            print(
                f"| {load} | {found['ratio']:.2f} | {found['auto_ms']:.2f} ms | {found['best_ms']:.2f} ms "
                f"{found['best']} | {found['defaults_ms']:.2f} ms | {settings} | {found['search_s']:.0f} s, "
                f"{found['search_steps']:,} steps |",
                flush=True,
            )
    save("tuning", options, loads=loads, worst=max(found["ratio"] for found in loads.values()))


if __name__ == "__main__":
    main()
