"""Measures feeds in this process: compared with both memory limits, and in a training loop."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np
from feedline._src.tools.bench.rounds import alternate
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline._src.tools.bench import limit

ROW_BYTES, BATCH_MB = (256, 3072, 12_288, 153_600), (16, 4)
THREAD_BATCH_KB, THREAD_ROW_BYTES, STEP_S = (256, 1024, 4096, 16_384), 3072, 4e-3
WARM_UP = 8
"""Batches taken before a measurement, so that prefetched batches and new host buffers are not measured."""


def feed_of(flat, row_bytes, batch_bytes):
    """(rows, rows in a batch, a feed of these rows to all devices)."""
    rows = flat[: len(flat) // row_bytes * row_bytes].reshape(-1, row_bytes)
    devices = jax.devices()
    batch_size = max(1, int(batch_bytes) // row_bytes // len(devices)) * len(devices)
    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    return rows, batch_size, feedline.Feed(rows, batch_size, sharding)


# --- feeds ---


def feeds(flat, rounds, seconds):
    """For each size of rows and batches: GB/s, shares and core-seconds a GB of the feed and of both limits."""
    return [beside_limits(flat, size, mb, rounds, seconds) for mb in BATCH_MB for size in ROW_BYTES]


def beside_limits(flat, row_bytes, batch_mb, rounds, seconds):
    """Measure feed and limits alternately. None if this version of feedline lacks a limit."""
    rows, batch_size, feed = feed_of(flat, row_bytes, batch_mb * 1e6)
    cpu = {"feed": [], "take": [], "gather": []}
    with feed:
        jax.block_until_ready(next(feed))
        threads = max(1, feed.statistics().threads)
        entrants = {
            "feed": taking(feed, batch_size * row_bytes, cpu["feed"]),
            "take": copying(limit.MemoryLimit(rows, batch_size, threads), row_bytes, cpu["take"]),
        }
        if hasattr(limit, "fastest_gather"):  # earlier versions lack it
            fastest = limit.MemoryLimit(rows, batch_size, threads, limit.fastest_gather)
            entrants["gather"] = copying(fastest, row_bytes, cpu["gather"])
        alternate(entrants, 1, seconds / 4)  # everything is compiled and mapped
        for samples in cpu.values():
            samples.clear()
        rates = {name: list(of.values()) for name, of in alternate(entrants, rounds, seconds).items()}
    shares = {
        f"feed_of_{name}": median([a / b for a, b in zip(rates["feed"], rates[name], strict=True)])
        if name in rates
        else None
        for name in ("take", "gather")
    }
    return {
        "row_bytes": row_bytes,
        "batch_mb": batch_mb,
        "threads": threads,
        "gb_per_s": {name: median(samples) for name, samples in rates.items()},
        **shares,
        "core_s_per_gb": {name: median(samples) for name, samples in cpu.items()},
        "samples": {"gb_per_s": rates, "core_s_per_gb": cpu},
    }


def taking(feed, batch_bytes, cpu):
    """GB/s of a loop that waits for each batch and does nothing else; core-seconds a GB are appended to `cpu`."""

    def rate(seconds):
        for _ in range(WARM_UP):
            jax.block_until_ready(next(feed))
        began, busy, batches = time.perf_counter(), time.process_time(), 0
        while batches == 0 or time.perf_counter() - began < seconds:
            jax.block_until_ready(next(feed))
            batches += 1
        took, gb = time.perf_counter() - began, batches * batch_bytes / 1e9
        cpu.append((time.process_time() - busy) / gb)
        time.sleep(0.02)  # the feed reads ahead now, and not while the next entrant is measured
        return gb / took

    return rate


def copying(of, row_bytes, cpu):
    """GB/s of a limit; core-seconds a GB are appended to `cpu`."""

    def rate(seconds):
        began, busy = time.perf_counter(), time.process_time()
        gb_per_s = of.rate(seconds) * row_bytes / 1e9
        took = time.perf_counter() - began
        cpu.append((time.process_time() - busy) / (gb_per_s * took))
        return gb_per_s

    return rate


# --- the training thread ---


def thread(flat, rounds, steps):
    """For each size of batches: microseconds in `next(feed)`, and in releasing the previous batch."""
    found = [{"batch_kb": kb, "next_us": [], "release_us": []} for kb in THREAD_BATCH_KB]
    for _ in range(rounds):
        for each in found:
            *_, feed = feed_of(flat, THREAD_ROW_BYTES, each["batch_kb"] * 1024)
            with feed:
                times = looped(feed, steps)
            for name, samples in times.items():
                each[name].append(median(samples))
    return [
        {
            "batch_kb": each["batch_kb"],
            "next_us": median(each["next_us"]),
            "release_us": median(each["release_us"]),
            "samples": {name: each[name] for name in ("next_us", "release_us")},
        }
        for each in found
    ]


def looped(feed, steps):
    """The times of a training loop that sleeps between two batches."""
    times = {"next_us": [], "release_us": []}
    batch = next(feed)
    for step in range(WARM_UP + steps):
        before, asked = batch, time.perf_counter()
        batch = next(feed)
        taken = time.perf_counter()
        del before  # its last reference
        released = time.perf_counter()
        if step >= WARM_UP:
            times["next_us"].append((taken - asked) * 1e6)
            times["release_us"].append((released - taken) * 1e6)
        time.sleep(STEP_S)
    return times


def median(samples):
    """The median; None without samples."""
    return statistics.median(samples) if samples else None
