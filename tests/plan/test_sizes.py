"""The arithmetic of batch sizes, against counting by hand and against feeds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import feedline
from feedline._src.options import Settings
from feedline._src.plan.sizes import Epoch, Memory, whole_sizes

counts = st.integers(1, 300)


@pytest.mark.parametrize("rows", [16, 17, 31, 100])
def test_an_epoch_of_a_feed(rows, sharding):
    source = {"x": np.arange(rows)}
    epoch = Epoch.of(rows, 16)
    with feedline.Feed(source, 16, sharding, epochs=1) as feed:
        assert feed.steps_per_epoch == epoch.steps == sum(1 for _ in feed)
        assert feed.statistics().dropped_rows == epoch.left_out
    with feedline.Feed(source, 16, sharding, epochs=1, remainder="pad") as feed:
        padding = [int((~np.asarray(batch["valid"])).sum()) for batch in feed]
        assert (len(padding), sum(padding)) == (epoch.padded_steps, epoch.padding)


@given(st.integers(1, 5000), counts, st.integers(1, 16))
def test_sizes_that_divide_the_rows(rows, size, multiple):
    found = whole_sizes(rows, size, multiple, most=1000)
    steps = max(1, size // multiple)  # in multiples
    tried = range(max(1, steps // 4), steps * 4 + 1)
    assert found == [n * multiple for n in tried if rows % (n * multiple) == 0]
    few = whole_sizes(rows, size, multiple, most=2)
    assert len(few) == min(2, len(found))
    assert set(few) <= set(found)


def test_of_many_sizes_those_nearest_by_ratio_are_told():
    assert whole_sizes(2**20, 64, 8) == [16, 32, 64, 128]
    assert whole_sizes(10**15, 4096, 64) == [3200, 4096, 5120, 6400]


def test_many_rows_and_large_batches_take_no_time():
    assert whole_sizes(1 << 62, (1 << 31) - 8, 1) == [1 << 31]
    assert Epoch.of((1 << 62) + 1, 1 << 20)[1:3] == (1 << 42, 1)


def test_memory_by_hand():
    """(2 + 1) × 1000, (2 + 2 + 3) × 1000, (2 + 1) × 40, 2 · (2 · 1 + 3) × 1000, (2 + 2) × 125."""
    assert Memory.of(1000, 40, 125, Settings(0, 2, 2, 2)) == (3000, 7000, 120, 10_000, 500)
    assert Memory.of(1000, 0, 125, Settings(4, 0, 4, 0)) == (5000, 7000, 0, 0, 250)
