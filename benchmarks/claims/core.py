"""What does a feed cost, compared with only copying its rows, and what does a batch cost the training thread?

- *feeds*: rows/s of a feed of shuffled uint8 rows ÷ those of `np.take` alone, and ÷ those of the fastest gather
  known, feedline's own in C; from memory and a mapped file, to one device and to all. Also core-seconds per GB.
- *thread*: µs that the training thread spends in `next(feed)`, and in releasing the previous batch: `del` releases
  the GIL, and must then wait for it. The thread sleeps 4 ms a step, as if it waited for accelerators.
- *order*: ns of one core per row, in calls of 65,536 rows; FEEDLINE_PURE_PYTHON=1 measures the order in NumPy.
- *resume*: ms in `set_state`, and from its return to the first batch, at large positions.

The script calls only public names of feedline, so that commits can be compared, alternately, on an idle machine:

    python benchmarks/claims/core.py --out core.json                        # four minutes
    PYTHONPATH=/another/checkout python benchmarks/claims/core.py           # with its C library built

Refuted if a feed from memory with batches of 16 MB is below 0.85 of `np.take`; if `next` takes more than 30 µs,
releasing a batch 40 µs, or the order 8 ns; or if a resume takes more than 10 ms, or longer at larger positions.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared.limit import MemoryLimit, fastest_gather, filler, numpy_gather
from shared.rounds import alternate, compared
from shared.script import parser, save

import feedline

WARM_UP = 8
"""Batches taken before a measurement, so that prefetched batches and new host buffers are not measured."""
LIMITS = {"limit": numpy_gather, "gather": fastest_gather}
OF = ("of_limit", "of_gather")
THREAD_KB, THREAD_ROW, STEP_S = (256, 1024, 4096, 16_384), 3072, 4e-3
ROWS, POSITIONS = (10**6, 10**9, 10**12, 10**15), (0, 10**6, 10**12)


class Computed:
    """`count` rows {"x": int32}, which take no memory: row i is i mod 2^31."""

    def __init__(self, count):
        self.spec = {"x": jax.ShapeDtypeStruct((), np.int32)}
        self.identity, self._count = {"kind": "computed"}, count

    def __len__(self):
        return self._count

    def read(self, rows, out):
        out["x"][...] = rows % (1 << 31)

    def close(self):
        pass


def on(devices):
    return NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))


def beside_limits(rows, file, batch_bytes, rounds, seconds):
    """Measure feeds from memory and from a file, to all devices and to the first, alternately with both limits."""
    devices, size = jax.devices(), rows.shape[1]
    batch_size = max(1, batch_bytes // size // len(devices)) * len(devices)
    cores = {}
    with contextlib.ExitStack() as stack:
        entrants, threads = {}, 1
        for name, source in {"memory": rows, "mapped": file}.items():
            for count in sorted({1, len(devices)}, reverse=True) if source is not None else ():
                feed = stack.enter_context(feedline.Feed(source, batch_size, on(devices[:count])))
                threads = max(threads, feed.statistics().threads)
                entrants[f"{name} → {count}"] = taking(feed, batch_size)
        for name, gather in LIMITS.items():
            with contextlib.suppress(ImportError):  # another version may have its gather elsewhere
                entrants[name] = MemoryLimit(rows, batch_size, threads, gather).rate
        entrants = {name: counted(rate, size, cores.setdefault(name, [])) for name, rate in entrants.items()}
        alternate(entrants, 1, seconds / 4)  # everything is compiled, mapped and cached
        for samples in cores.values():
            samples.clear()
        rates = alternate(entrants, rounds, seconds)
    found = compared(rates, "limit")
    for name, beside in (compared(rates, "gather") if "gather" in rates else {}).items():
        found[name] |= {"of_gather": beside["of_limit"], "of_gather_interval": beside["of_limit_interval"]}
    return {
        "row_bytes": size,
        "batch_bytes": batch_bytes,
        "batch_size": batch_size,
        "devices": len(devices),
        "threads": threads,
        "core_s_per_gb": {name: statistics.median(samples) for name, samples in cores.items()},
        "entrants": found,
    }


def taking(feed, batch_size):
    """(seconds) → rows/s of a loop that waits for each batch and does nothing with it."""

    def rate(seconds):
        for _ in range(WARM_UP):
            jax.block_until_ready(next(feed))
        began, batches = time.perf_counter(), 0
        while batches == 0 or time.perf_counter() - began < seconds:
            jax.block_until_ready(next(feed))
            batches += 1
        return batches * batch_size / (time.perf_counter() - began)

    return rate


def counted(rate, row_bytes, samples):
    """`rate`, which also appends the core-seconds per GB to `samples`."""

    def measured(seconds):
        began, busy = time.perf_counter(), time.process_time()
        found = rate(seconds)
        samples.append((time.process_time() - busy) / (time.perf_counter() - began) / (found * row_bytes) * 1e9)
        return found

    return measured


def feeds(flat, options):
    found = []
    print("   row B batch MB  from → devices    M rows/s    GB/s  ÷ np.take          ÷ fastest gather  core-s/GB")
    for size in options.row_bytes:
        rows = flat[: len(flat) // size * size].reshape(-1, size)
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/rows.npy", rows)
            for batch_mb in options.batch_mb:
                one = beside_limits(
                    rows, f"{folder}/rows.npy", int(batch_mb * 1e6), options.rounds, options.seconds
                )
                found.append(one)
                for name, entrant in one["entrants"].items():
                    rate, shares = entrant["median"], "  ".join(_share(entrant, of) for of in OF)
                    speed = f"{rate / 1e6:>9.3f} {rate * size / 1e9:>7.2f}"
                    cores = f"{one['core_s_per_gb'][name]:.3f}"
                    print(f"{size:>8} {batch_mb:>8g}  {name:<16} {speed}  {shares} {cores}", flush=True)
    return found


def _share(entrant, of):
    if of not in entrant:
        return f"{'–':<17}"
    low, high = entrant[f"{of}_interval"]
    return f"{f'{entrant[of]:.2f} [{low:.2f}, {high:.2f}]':<17}"


def thread(flat, options):
    rows, found = flat[: len(flat) // THREAD_ROW * THREAD_ROW].reshape(-1, THREAD_ROW), []
    for kb in THREAD_KB:
        batch_size = kb * 1024 // THREAD_ROW // 8 * 8
        samples = [looped(rows, batch_size, options.steps) for _ in range(min(3, options.rounds))]
        next_us, release_us = map(statistics.median, zip(*samples, strict=True))
        found.append({"batch_kb": kb, "next_us": next_us, "release_us": release_us, "samples": samples})
        print(f"{kb:>6} KB: next {next_us:.0f} µs, letting go {release_us:.0f} µs", flush=True)
    return found


def looped(rows, batch_size, steps):
    """Median µs in `next`, and to release the previous batch, in a training loop that sleeps between batches."""
    next_us, release_us = [], []
    with feedline.Feed(rows, batch_size, on(jax.devices())) as feed:
        batch = next(feed)
        for step in range(WARM_UP + steps):
            before, asked = batch, time.perf_counter()
            batch = next(feed)
            taken = time.perf_counter()
            del before  # its last reference
            released = time.perf_counter()
            if step >= WARM_UP:
                next_us.append((taken - asked) * 1e6)
                release_us.append((released - taken) * 1e6)
            time.sleep(STEP_S)
    return statistics.median(next_us), statistics.median(release_us)


def order(flat, options):
    found = {}
    for name, shuffle in {"full": True, "blocked": feedline.Blocks(rows=341, window=64)}.items():
        for count in ROWS:
            case = f"{name}, 10^{len(str(count)) - 1}"
            found[case] = order_ns(Computed(count), options.rounds, order=feedline.Order(7, shuffle))
            print(f"order, {case}: {found[case]:.1f} ns a row", flush=True)
    return found


def order_ns(source, rounds, **options):
    """Nanoseconds of one core for a row of a feed's order, the median."""
    samples = []
    with feedline.Feed(source, 1 << 16, jax.devices()[0], **options) as feed:
        state = feed.get_state()
        for call in range(8 * (rounds + 1)):
            began = time.thread_time()
            feed.rows_of({**state, "position": call % 8 << 16})
            samples.append((time.thread_time() - began) / (1 << 16) * 1e9)
    return statistics.median(samples[8:])  # the first calls warm up


def resume(flat, options):
    found = []
    with feedline.Feed(Computed(10**15), 1024, on(jax.devices())) as feed:
        state = feed.get_state()
        for position in POSITIONS:
            samples = []
            for _ in range(7 * options.rounds):
                began = time.perf_counter()
                feed.set_state({**state, "position": position})
                restored = time.perf_counter()
                jax.block_until_ready(next(feed))
                samples.append(((restored - began) * 1e3, (time.perf_counter() - restored) * 1e3))
            restore_ms, first_ms = map(statistics.median, zip(*samples, strict=True))
            medians = {"restore_ms": restore_ms, "first_batch_ms": first_ms}
            found.append({"position": position, **medians, "samples": samples})
            print(f"position {position:>17,}: set_state {restore_ms:.2f} ms, first batch {first_ms:.2f} ms later")
    return found


PARTS = {"feeds": feeds, "thread": thread, "order": order, "resume": resume}


def main():
    asked = parser(__doc__)
    asked.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    asked.add_argument("--row-bytes", type=int, nargs="+", default=[256, 3072, 12_288, 153_600])
    asked.add_argument("--batch-mb", type=float, nargs="+", default=[16, 4], help="in 10^6 bytes")
    asked.add_argument("--gib", type=float, default=2, help="of rows, in memory and once more in a file")
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--seconds", type=float, default=0.6, help="of each measurement in a round")
    asked.add_argument("--steps", type=int, default=300, help="of the training loop")
    options = asked.parse_args()
    print(f"feedline {feedline.__version__} of {Path(feedline.__file__).parent}", flush=True)
    flat = filler(int(options.gib * 2**30))
    save("core", options, results={name: PARTS[name](flat, options) for name in options.parts})


if __name__ == "__main__":
    main()
