"""Draws the report on a feed that reads more slowly than the loop trains: 60 ms a batch, and steps of 10 ms.

python benchmarks/claims/report.py report.svg
"""

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.slow import Slow, computation

import feedline

if __name__ == "__main__":
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = computation(jax.numpy.zeros((64, 28, 28)), 0.010)
    source, reading = Slow(0.060, (28, 28)), feedline.Reading(threads=2)
    with feedline.Feed(source, 64, sharding, reading=reading) as feed:
        for _ in range(200):
            step(next(feed)).block_until_ready()
        report = feed.report()
    print(report)
    report.save(sys.argv[1])
