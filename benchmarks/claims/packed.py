"""How full are packed rows, and how fast are they read, compared with Grain's packing and a copy of the bytes?

    python benchmarks/claims/packed.py

Lengths are log-normal, the longest 2,048 tokens. Grain packs by best fit with 64 bins, and gets the documents in
another order. The copy writes the three leaves of a batch from arrays in memory, and casts tokens to int32.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import grain
from shared.script import parser, save

import feedline

LENGTH, BATCH, ROUNDS = 2048, 512, 9


def documents(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the offsets of documents."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(5.5, 1.2, count).astype(np.int64) + 1, LENGTH)
    return random.integers(0, 50_000, lengths.sum(), np.uint16), np.concatenate([[0], np.cumsum(lengths)])


def by_grain(tokens: np.ndarray, offsets: np.ndarray) -> tuple[float, float]:
    """(fill, tokens a second) of Grain's packing of the same documents, in one thread."""
    rows = grain.MapDataset.range(len(offsets) - 1).seed(0).shuffle()
    rows = rows.map(lambda i: {"tokens": tokens[offsets[i] : offsets[i + 1]].astype(np.int32)})
    packed = grain.experimental.BestFitPackIterDataset(
        rows.to_iter_dataset(), length_struct={"tokens": LENGTH}, num_packing_bins=64
    )
    began, filled, count = time.perf_counter(), 0, 0
    for row in packed:
        filled += int(np.count_nonzero(row["tokens_segment_ids"]))
        count += 1
    return filled / (count * LENGTH), filled / (time.perf_counter() - began)


def read(tokens: np.ndarray, offsets: np.ndarray) -> tuple[float, float, float, float]:
    """(seconds to plan, fill, time of a copy ÷ time of a read, tokens a second) of `feedline.Packed`."""
    began = time.perf_counter()
    packed = feedline.Packed((tokens, offsets), LENGTH)
    plan_s = time.perf_counter() - began
    random = np.random.default_rng(1)
    out = {name: np.zeros((BATCH, LENGTH), np.int32) for name in packed.spec}
    windows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH)
    marks = np.ones((BATCH, LENGTH), np.int32)
    ratios, speeds = [], []
    for _ in range(ROUNDS):
        rows = random.integers(0, len(packed), BATCH)
        where = feedline.Rows(np.zeros(BATCH, np.int64), rows, rows, rows.astype(np.uint64))
        began = time.perf_counter()
        packed.read_positioned(where, out)
        read_s = time.perf_counter() - began
        filled = np.count_nonzero(out["segment_ids"])
        starts = random.integers(0, len(windows), BATCH)
        began = time.perf_counter()
        for i, start in enumerate(starts.tolist()):
            out["tokens"][i] = windows[start]
        np.copyto(out["segment_ids"], marks)
        np.copyto(out["positions"], marks)
        ratios.append((time.perf_counter() - began) / read_s)
        speeds.append(filled / read_s)
    return plan_s, packed.fill, statistics.median(ratios), statistics.median(speeds)


def main() -> None:
    options = parser(__doc__).parse_args()
    results = {}
    for count in (100_000, 1_000_000):
        plan_s, fill, ratio, speed = read(*documents(count))
        results[f"{count:,} documents"] = {
            "plan_s": plan_s,
            "fill": fill,
            "copy_by_read": ratio,
            "tokens_s": speed,
        }
    fill, speed = by_grain(*documents(50_000))
    results["grain, 50,000 documents"] = {"fill": fill, "tokens_s": speed}
    for name, found in results.items():
        print(f"{name:>24}: {', '.join(f'{key} {value:,.5g}' for key, value in found.items())}")
    save("packed", options, results=results)


if __name__ == "__main__":
    main()
