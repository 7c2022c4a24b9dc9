"""How fast does a feed deliver rows to the mesh, compared with only copying the same rows?

Generated rows of several sizes are read shuffled, from memory and from a mapped file, to one device and to all.
Copying alone is done by `np.take`, and by the fastest gather known, which is feedline's own in C. The claim, 0.85
of `np.take` with 16 MB batches from memory, is refuted by a lower median on a quiet machine.

    python benchmarks/claims/feed.py --rounds 7 --seconds 0.6 --out feed.json
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared.limit import MemoryLimit, fastest_gather, filler
from shared.rounds import Entrant, alternate, compared
from shared.script import parser, save

from feedline import Feed

_WARM_UP = 8
"""Batches taken before a measurement, so that batches that were already prefetched are not measured."""
_LIMITS = {"limit": "np.take alone", "gather": "gather alone"}


def matrix(
    folder: Path,
    data_bytes: int,
    row_bytes: Sequence[int],
    batch_bytes: Sequence[int],
    rounds: int,
    seconds: float,
    report: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Feeds of shuffled uint8 rows from memory and from a mapped, cached file, to one device and to all.

    Args:
      folder: where the file is written; it is removed at the end.
      data_bytes: size of the source: much larger than the processor's caches.
      row_bytes, batch_bytes: every pair is measured.
      rounds, seconds: of each feed and of both limits, measured alternately.
      report: called with each result.

    Returns:
      for each pair {"row_bytes", "batch_bytes", "batch_size", "devices", "threads",
      "entrants": {name: the result of `compared`, in rows/s, with "of_gather" and "of_gather_interval" added}}.
      The entrant "limit" is `np.take`, and "gather" the fastest gather known.
    """
    found = []
    flat = filler(data_bytes)
    with _file_of(flat, folder) as path:
        for size in row_bytes:
            rows = flat[: len(flat) // size * size].reshape(-1, size)
            mapped = np.load(path, mmap_mode="r")[: rows.size].reshape(rows.shape)
            for wanted in batch_bytes:
                result = _measured(rows, mapped, wanted, rounds, seconds)
                report(result)
                found.append(result)
    return found


def _measured(
    rows: npt.NDArray[Any], mapped: npt.NDArray[Any], batch_bytes: int, rounds: int, seconds: float
) -> dict[str, Any]:
    devices = jax.devices()
    size = rows.shape[1]
    batch_size = max(1, batch_bytes // size // len(devices)) * len(devices)
    with contextlib.ExitStack() as stack:
        entrants: dict[str, Entrant] = {}
        threads = 0
        for name, source in (("memory", rows), ("mapped", mapped)):
            for count in sorted({1, len(devices)}, reverse=True):
                mesh = Mesh(np.array(devices[:count]), ("data",))
                feed = stack.enter_context(Feed(source, batch_size, NamedSharding(mesh, PartitionSpec("data"))))
                threads = max(1, feed.statistics().threads)
                entrants[f"{name} → {count}"] = _taking(feed, batch_size)
        entrants["limit"] = MemoryLimit(rows, batch_size, threads).rate
        entrants["gather"] = MemoryLimit(rows, batch_size, threads, fastest_gather).rate
        alternate(entrants, 1, seconds / 4)  # everything is compiled, mapped and cached
        rates = alternate(entrants, rounds, seconds)
    found, beside_gather = compared(rates, "limit"), compared(rates, "gather")
    for name, entrant in found.items():
        entrant["of_gather"] = beside_gather[name]["of_limit"]
        entrant["of_gather_interval"] = beside_gather[name]["of_limit_interval"]
    return {
        "row_bytes": size,
        "batch_bytes": batch_bytes,
        "batch_size": batch_size,
        "devices": len(devices),
        "threads": threads,
        "entrants": found,
    }


def _taking(feed: Feed, batch_size: int) -> Entrant:
    """Rows per second of a loop that waits for each batch and does nothing with it."""

    def rate(seconds: float) -> float:
        for _ in range(_WARM_UP):
            jax.block_until_ready(next(feed))
        began, batches = time.perf_counter(), 0
        while batches == 0 or time.perf_counter() - began < seconds:
            jax.block_until_ready(next(feed))
            batches += 1
        return batches * batch_size / (time.perf_counter() - began)

    return rate


@contextlib.contextmanager
def _file_of(flat: npt.NDArray[np.uint8], folder: Path) -> Iterator[Path]:
    path = folder / f"feedline-bench-{len(flat)}.npy"
    try:
        np.save(path, flat)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _print_line(result: dict[str, Any]) -> None:
    size, batch = result["row_bytes"], result["batch_bytes"] / 1e6
    for name, entrant in result["entrants"].items():
        where, rate = f"{size:>8} {batch:>8g}  {_LIMITS.get(name, name):<16}", entrant["median"]
        of_take, of_gather = (_share(entrant[of], *entrant[f"{of}_interval"]) for of in ("of_limit", "of_gather"))
        print(f"{where} {rate / 1e6:>9.3f} {rate * size / 1e9:>7.2f}  {of_take:<17}  {of_gather}", flush=True)


def _share(median: float, low: float, high: float) -> str:
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    """Measure, print and save."""
    asked = parser(__doc__)
    asked.add_argument("--row-bytes", type=int, nargs="+", default=[256, 3072, 12288, 153600])
    asked.add_argument("--batch-mb", type=float, nargs="+", default=[16, 4], help="in 10^6 bytes")
    asked.add_argument("--gib", type=float, default=2, help="of rows, in memory and once more in a file")
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--seconds", type=float, default=0.7, help="of each measurement")
    options = asked.parse_args()
    print("   row B batch MB  from → devices    M rows/s    GB/s  ÷ np.take          ÷ fastest gather")
    with tempfile.TemporaryDirectory() as folder:
        found = matrix(
            Path(folder),
            int(options.gib * 2**30),
            options.row_bytes,
            [int(size * 1e6) for size in options.batch_mb],
            options.rounds,
            options.seconds,
            _print_line,
        )
    save("feed", options, results=found)


if __name__ == "__main__":
    main()
