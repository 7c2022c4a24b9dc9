"""Rows of different lengths: the same batches of the same buckets in one process and in several."""

import numpy as np
import pytest

import feedline
from feedline._src.order.epoch import rows_at

from .cases import case
from .launch import ALONE, TWO_OR_FOUR
from .layouts import sharding_of
from .values import assert_same

pytestmark = pytest.mark.slow

N, SIZE, PAD_TO, ORDER = 50, 8, (4, 18, 30), feedline.Order(seed=4)
LENGTHS = np.where(np.arange(N) % 9 == 0, np.arange(N) // 2, np.arange(N) % 5)
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
VALUES = np.arange(1, OFFSETS[-1] + 1)
BAD = [1, 13, 28]
LAYOUTS = ["data", "permuted", "model"]
POLICIES = ["raise", "substitute"]


@case(LAYOUTS, POLICIES, on=lambda layout, policy: TWO_OR_FOUR)
def a_ragged_pass(here, layout, policy):
    """The batches of two epochs; and again those after the third batch, from the state there."""
    values = VALUES.copy()
    if policy == "substitute":
        values[OFFSETS[BAD]] = 2**40  # does not fit int32
    source = feedline.Ragged({"tokens": (values, OFFSETS), "y": np.arange(N, dtype=np.int32)}, PAD_TO, -1)
    with feedline.Feed(
        source,
        SIZE,
        sharding_of(layout, here.devices),
        order=ORDER,
        epochs=2,
        remainder="pad" if policy == "raise" else "drop",
        reading=feedline.Reading(bad_rows=policy, bad_rows_budget=N, check_replicas_every=1),
    ) as feed:
        batches = [next(feed) for _ in range(3)]
        state = feed.get_state()
        batches += list(feed)
        feed.set_state(state)
        return {"batches": batches, "again": list(feed)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_processes_agree_on_batches_and_buckets(outcome, layout, policy):
    alone = outcome(ALONE, a_ragged_pass, layout, policy)
    assert_same(alone["again"], alone["batches"][3:])
    for topology in TWO_OR_FOUR:
        assert_same(outcome(topology, a_ragged_pass, layout, policy), alone)


def test_each_row_is_padded_to_the_bucket_of_the_global_batch(outcome):
    batches = outcome(TWO_OR_FOUR[0], a_ragged_pass, "permuted", "raise")["batches"]
    seen = []
    for batch in batches:
        length = next(length for length in PAD_TO if length >= LENGTHS[batch["y"]].max())
        expected = np.full((SIZE, length), -1)
        for i, row in enumerate(batch["y"].tolist()):
            expected[i, : LENGTHS[row]] = VALUES[OFFSETS[row] : OFFSETS[row + 1]]
        np.testing.assert_array_equal(batch["tokens"], expected)
        np.testing.assert_array_equal(batch["tokens_length"], LENGTHS[batch["y"]])
        seen += batch["y"][batch["valid"]].tolist()
    assert seen == np.concatenate([rows_at(ORDER, N, epoch, np.arange(N)) for epoch in range(2)]).tolist()
    assert {batch["tokens"].shape[1] for batch in batches} == set(PAD_TO)
