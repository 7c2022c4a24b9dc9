"""How many times as fast as a full shuffle is a blocked order, if the file is not in memory?

Several threads read batches from a mapped .npy file of random bytes, in rows of 3 KiB, with feedline's source. No
page of the file is in the page cache when a measurement begins. Refuted if no blocked order reaches twice the
rows/s of the full shuffle.

Each order reads the first 256 MiB of rows of an epoch, which is one window of each blocked order. `read` is the
number of bytes that the kernel fetched for this process ÷ the bytes of these rows. In a full shuffle, pages that
the kernel read ahead stay in memory and serve later rows. So its rows/s grow with the number of rows, unless the
data are larger than memory. No gain can exceed the size of the file ÷ the size of the rows, so a file of 256 MiB
shows nothing. Blocks smaller than the kernel's read-ahead, which is printed, should gain little.

    python benchmarks/claims/cold.py --folder /data    # 8 GiB, minutes; not a tmpfs

The file is removed afterwards.
"""

import contextlib
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

import feedline
from feedline import Blocks, Order
from feedline._src.order.epoch import rows_at

ROW_BYTES, PART_ROWS, READ_ROWS = 3072, 1 << 15, 87_380
BLOCKS = [(85, 1024), (341, 256), (1365, 64), (5461, 16)]  # rows, window: 256 MiB in blocks of ¼, 1, 4, 16 MiB
SHUFFLES = {"full": True, **{f"{rows} x {window}": Blocks(rows, window) for rows, window in BLOCKS}}


def make(path, rows):
    """Write random bytes, which no file system can compress."""
    random = np.random.default_rng(0)
    mapped = np.lib.format.open_memmap(path, "w+", np.uint8, (rows, ROW_BYTES))
    for first in range(0, rows, PART_ROWS):
        part = mapped[first : first + PART_ROWS]
        part[...] = np.frombuffer(random.bytes(part.size), np.uint8).reshape(part.shape)


def drop(path):
    """Write the file back and remove its pages from the page cache, except those that a process has mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ahead_kib(path):
    """The kernel's read-ahead for this file."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return int(setting.read_text()) if setting.exists() else None


def fetched_bytes():
    """The bytes that the kernel has read from storage for this process."""
    counters = Path("/proc/self/io").read_text()
    return int(counters.partition("\nread_bytes: ")[2].split()[0])


def sample(path, order, options):
    """Read the first positions of an epoch once, from a cold page cache."""
    drop(path)
    with contextlib.closing(feedline.open_source(path)) as source, ThreadPoolExecutor(options.threads) as pool:
        own, rows = threading.local(), min(READ_ROWS, len(source))

        def read(first):
            if not hasattr(own, "buffer"):
                own.buffer = np.empty((options.batch, ROW_BYTES), np.uint8)
            positions = np.arange(first, min(first + options.batch, rows))
            source.read(rows_at(order, len(source), 0, positions), own.buffer[: positions.size])

        fetched, begun = fetched_bytes(), time.perf_counter()
        for _ in pool.map(read, range(0, rows, options.batch)):
            pass
        seconds, fetched = time.perf_counter() - begun, fetched_bytes() - fetched
    if fetched < rows * ROW_BYTES / 2:
        raise RuntimeError("rows came from memory: is the folder a tmpfs, or does another process map the file?")
    return {"rows_per_s": round(rows / seconds), "read": round(fetched / (rows * ROW_BYTES), 3)}


def main():
    asked = parser(__doc__)
    asked.add_argument("--folder", type=Path, required=True, help="where the file is written; not a tmpfs")
    asked.add_argument("--gib", type=float, default=8.0, help="size of the file")
    asked.add_argument("--batch", type=int, default=4096, help="rows in a read")
    asked.add_argument("--threads", type=int, default=8, help="reading threads")
    asked.add_argument("--repeats", type=int, default=3)
    options = asked.parse_args()
    path, samples = options.folder / "feedline-cold.npy", {name: [] for name in SHUFFLES}
    try:
        make(path, int(options.gib * 2**30) // ROW_BYTES)
        read_ahead = read_ahead_kib(path)
        print("read-ahead:", read_ahead, "KiB")
        for seed in range(options.repeats):
            for name, shuffle in SHUFFLES.items():  # alternately, so that a busy moment affects all
                samples[name].append(sample(path, Order(seed, shuffle), options))
    finally:
        path.unlink(missing_ok=True)
    gains = {}
    for name, found in samples.items():
        pairs = zip(found, samples["full"], strict=True)
        gains[name] = statistics.median(one["rows_per_s"] / full["rows_per_s"] for one, full in pairs)
        rate, read = (statistics.median(each[key] for each in found) for key in ("rows_per_s", "read"))
        print(f"{name:>10}: {rate:10,.0f} rows/s, gain {gains[name]:.2f}, read {read:.2f}")
    refuted = max(gain for name, gain in gains.items() if name != "full") < 2
    print("refuted" if refuted else "not refuted")
    save("cold", options, read_ahead_kib=read_ahead, gains=gains, samples=samples)


if __name__ == "__main__":
    main()
