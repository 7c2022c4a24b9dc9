"""Batch sizes that change at given steps: they move the boundaries of batches, but not the order of rows."""

import jax
import numpy as np
import pytest
from test_feed_lifecycle import interrupted_at

from feedline import Feed, Order
from feedline._src.order.epoch import rows_at

N = 100
ROWS = {"x": np.arange(N, dtype=np.int32)}
SIZES = [(0, 8), (3, 24), (5, 16), (9, 40)]


def expected(sizes, remainder, steps):
    """The batches, cut out of shuffled epochs one by one."""
    found, epoch, position = [], 0, 0
    for step in range(steps):
        (size,) = [size for start, size in sizes if start <= step][-1:]
        if remainder == "drop" and position + size > N:
            epoch, position = epoch + 1, 0
        rows = []
        for _ in range(size):
            if position == N:
                epoch, position = epoch + 1, 0
            rows.append(rows_at(Order(), N, epoch, np.array([position]))[0])
            position += 1
        found.append(np.array(rows))
    return found


@pytest.mark.parametrize("remainder", ["wrap", "drop"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_rows_are_those_of_a_loop_over_steps(sharding, remainder, prefetch):
    whole, placed = expected(SIZES, remainder, 14), 0
    with Feed(ROWS, SIZES, sharding, remainder=remainder, prefetch=prefetch) as feed:
        for rows in whole:
            assert feed.batch_size == feed.spec["x"].shape[0] == len(rows)
            np.testing.assert_array_equal(feed.rows_of(feed.get_state()), rows)
            batch = next(feed)
            assert (batch["x"].shape, batch["x"].sharding) == ((len(rows),), sharding)
            np.testing.assert_array_equal(batch["x"], rows)
            placed += 4 * len(rows)
            assert feed.statistics().placed_bytes == placed
            assert f"batch_size {feed.batch_size}" in repr(feed)
        assert feed.statistics().rows == sum(map(len, whole))


def test_a_state_takes_other_sizes_from_its_step_on(sharding):
    with Feed(ROWS, SIZES, sharding, remainder="wrap") as feed:
        states = [feed.get_state() for _ in zip(range(6), feed, strict=False)]
    later = [*SIZES[:2], (4, 8)]
    with Feed(ROWS, later, sharding, remainder="wrap") as feed:
        feed.set_state(states[3])  # after four steps
        np.testing.assert_array_equal(next(feed)["x"], expected(later, "wrap", 5)[4])
        with pytest.raises(ValueError, match=r"'batch_sizes': \[\[0, 8\], \[3, 24\], \[4, 8\]\]"):
            feed.set_state(states[4])
        feed.set_state(states[4], allow=("order",))
    with Feed(ROWS, 32, sharding, remainder="wrap") as feed:  # a single size may always change
        feed.set_state(states[4])
        at, saved = feed.position, feed.get_state()
        np.testing.assert_array_equal(next(feed)["x"], expected([(0, at), (1, 32)], "wrap", 2)[1])
    with Feed(ROWS, SIZES, sharding, remainder="wrap") as feed:
        feed.set_state(saved)
        assert (saved["step"], feed.batch_size) == (5, 16)


def test_passes_end_and_begin_whatever_the_size(sharding):
    with Feed(ROWS, [(0, 48), (2, 32)], sharding, epochs=1) as feed:
        assert [len(batch["x"]) for batch in feed] == [48, 48]
        assert feed.batch_size == 32
        assert [len(batch["x"]) for batch in feed] == [32, 32, 32]
        assert feed.steps_per_epoch == 3
        assert feed  # has a truth value, although it has no length
        with pytest.raises(TypeError, match=r"len needs passes of known length.*; bound the loop"):
            len(feed)
    with Feed(ROWS, [(0, 48), (1, 64)], sharding, epochs=1, remainder="pad") as feed:
        padded = [np.asarray(batch["valid"]).sum() for batch in feed]
        assert padded == [48, 52]


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_change_loses_nothing():
    whole = expected([(0, 8), (2, 16)], "wrap", 5)
    for line in range(1, 3000):
        sizes = [(0, 8), (2, 16)]
        with Feed(ROWS, sizes, jax.devices()[0], remainder="wrap") as feed:
            next(feed), next(feed)
            where, _ = interrupted_at(line, lambda: next(feed))
            step = feed.get_state()["step"]
            assert step == 3 if where is None else step in (2, 3)
            for rows, batch in zip(whole[step:], feed, strict=False):
                np.testing.assert_array_equal(batch["x"], rows)
            assert feed.statistics().placed_bytes == 4 * sum(map(len, whole))
        if where is None:
            break
    assert 40 < line < 2999
