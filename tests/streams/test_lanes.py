"""Lanes (`feedline.Lanes`) in one process: what a batch holds, how epochs end, the state, and refusals."""

import json

import grain
import jax
import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline import Feed, FeedError, Lanes, Reading

STRIDE = 1000
"""Item i of lane l is l · STRIDE + i."""


def lanes_of(lengths, broken=()):
    """Lanes with these numbers of items. Reading fails at the items `broken`, pairs (lane, i)."""

    def make_lane(lane, count):
        assert count == len(lengths)

        def item(i):
            if (lane, i) in broken:
                raise OSError("the disk is gone")
            return {"x": np.int32(lane * STRIDE + i)}

        return grain.MapDataset.range(lengths[lane]).map(item).to_iter_dataset(grain.ReadOptions(0, 0))

    return Lanes(make_lane, len(lengths))


def items_of(lengths):
    return [[lane * STRIDE + i for i in range(n)] for lane, n in enumerate(lengths)]


def epoch_of(lanes, size, remainder, first):
    """The batches of (value, valid) of one epoch, row by row from the definition. `lanes`: the items of each."""
    share = size // len(lanes)
    batches = []
    for start in range(0, max(map(len, lanes)), share):
        parts = [lane[start : start + share] for lane in lanes]
        if remainder == "drop" and any(len(part) < share for part in parts):
            break
        padded = [[(part or [first])[i % len(part or [0])] for i in range(share)] for part in parts]
        batches.append(
            [(x, i < len(part)) for part, row in zip(parts, padded, strict=True) for i, x in enumerate(row)]
        )
    return batches


def seen_of(batch):
    x = np.asarray(batch["x"])
    valid = np.asarray(batch.get("valid", np.ones(len(x), bool)))
    return list(zip(x.tolist(), valid.tolist(), strict=True))


def passes_of(lanes, size, remainder, first, epochs):
    """The batches of several epochs."""
    if remainder != "wrap":
        return epoch_of(lanes, size, remainder, first) * epochs
    run = lanes[0] * epochs
    return [[(x, True) for x in run[i : i + size]] for i in range(0, len(run) - size + 1, size)]


@pytest.mark.filterwarnings("ignore:this loop")
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(lambda n: len(n) != 3 and any(n)),
    st.sampled_from([8, 16]),
    st.sampled_from([8, 24]),
    st.integers(1, 3),
    st.sampled_from(["drop", "pad", "wrap"]),
    st.data(),
)
def test_batches_and_a_resume_with_another_batch_size(sharding, lengths, size, other, epochs, remainder, data):
    if remainder == "wrap":
        lengths = lengths[:1]
    if remainder != "pad":
        lengths = [n + 24 for n in lengths]  # a batch of either size in every epoch
    lanes, items = lanes_of(lengths), items_of(lengths)
    first = next(x for lane in items for x in lane)
    batches, epoch = passes_of(items, size, remainder, first, epochs), epoch_of(items, size, remainder, first)
    cut = data.draw(st.integers(0, len(batches)))
    with Feed(lanes, size, sharding, epochs=epochs, remainder=remainder) as feed:
        seen = [seen_of(batch) for _, batch in zip(range(cut), feed, strict=False)]
        state = json.loads(json.dumps(feed.get_state()))
        assert seen == batches[:cut]
        assert state["step"] == cut
        seen += [seen_of(batch) for batch in feed]
        counted = feed.statistics()
    assert seen == batches
    assert counted.rows == sum(v for batch in seen for _, v in batch)
    assert counted.rows + counted.dropped_rows == epochs * sum(lengths)

    with Feed(lanes, other, sharding, epochs=epochs, remainder=remainder) as feed:
        feed.set_state(state)
        rest = [seen_of(batch) for batch in feed]
    if remainder == "wrap":
        assert rest == passes_of([(items[0] * epochs)[cut * size :]], other, remainder, first, 1)
        return
    whole, delivered = divmod(cut, len(epoch))
    if cut and not delivered:  # after the last batch of an epoch, the feed is still in that epoch
        whole, delivered = whole - 1, len(epoch)
    left = [lane[delivered * size // len(items) :] for lane in items]
    expected = epoch_of(left, other, remainder, first)
    assert rest == expected + passes_of(items, other, remainder, first, epochs - whole - 1)


def test_a_transform_sees_the_round_robin(sharding):
    def transform(batch, rows):
        return {"x": batch["x"], "at": rows.position.astype(np.int32)}

    with Feed(lanes_of([8, 8]), 8, sharding, epochs=1, transform=transform) as feed:
        rows = [(int(x), int(at)) for batch in feed for x, at in zip(batch["x"], batch["at"], strict=True)]
    assert sorted(rows, key=lambda row: row[1]) == [(at % 2 * STRIDE + at // 2, at) for at in range(16)]


def test_a_lane_that_fails_is_named_after_the_batches_before_it(sharding):
    with Feed(lanes_of([20, 20], broken={(1, 9)}), 8, sharding, epochs=1) as feed:
        next(feed)
        next(feed)
        with pytest.raises(
            FeedError, match="lane 1 failed after 9 items of epoch 0 with OSError: the disk is gone"
        ):
            next(feed)
        assert feed.get_state()["position"] == 16
        assert feed.get_state()["lanes"] == {"0": {"next_index": 8}, "1": {"next_index": 8}}


@pytest.mark.parametrize("policy", ["substitute", "mask"])
def test_the_first_item_of_lane_0_replaces_bad_items_and_padding_is_not_counted(sharding, policy):
    bad = {(0, 2): np.zeros(3, np.int64), (1, 4): np.int64(1 << 40)}

    def make_lane(lane, count):
        def item(i):
            return {"x": bad.get((lane, i), np.int64(lane * STRIDE + i))}

        return grain.MapDataset.range([8, 5][lane]).map(item).to_iter_dataset(grain.ReadOptions(0, 0))

    reading = Reading(bad_rows=policy, bad_rows_budget=2)
    with Feed(Lanes(make_lane, 2), 8, sharding, epochs=1, remainder="pad", reading=reading) as feed:
        seen = [seen_of(batch) for batch in feed]
        assert feed.statistics().bad_rows == 2
    good = policy == "substitute"
    assert seen == [
        [(0, True), (1, True), (0, good), (3, True), *((STRIDE + i, True) for i in range(4))],
        [(4, True), (5, True), (6, True), (7, True), (0, good), (0, False), (0, False), (0, False)],
    ]


@pytest.mark.parametrize(
    ("build", "remainder", "error", "message"),
    [
        (lambda: Lanes(2, 2), "drop", TypeError, "Lanes takes a function .*, got 2"),
        (lambda: Lanes(lambda lane, count: grain.MapDataset.range(9), 2), "drop", TypeError, "for lane 0; call"),
        (lambda: Lanes(lanes_of([1]).make_lane, 0), "drop", ValueError, "Lanes.count must be at least 1, got 0"),
        (lambda: lanes_of([9, 9, 9]), "drop", ValueError, "and of the 3 lanes, so of 24, got 16; 24 would"),
        (lambda: lanes_of([9, 9]), "wrap", ValueError, '"wrap" needs one lane, since each ends'),
        (lambda: lanes_of([0, 0]), "drop", ValueError, "at least one row, got 2 lanes without an item"),
        (lambda: lanes_of([40, 3]), "drop", FeedError, "of lane 1 has only 3 items; a batch of 16 needs 8"),
    ],
)  # fmt: skip
def test_lanes_that_do_not_suit_are_refused(sharding, build, remainder, error, message):
    with pytest.raises(error, match=message), Feed(build(), 16, sharding, remainder=remainder) as feed:
        next(feed)


def test_a_state_of_other_lanes_is_refused(sharding):
    with Feed(lanes_of([20, 20]), 8, sharding) as feed:
        next(feed)
        state = feed.get_state()
    with (
        Feed(lanes_of([20, 20, 20, 20]), 8, sharding) as feed,
        pytest.raises(ValueError, match="its 'format' is '2 lanes', this feed's is '4 lanes'"),
    ):
        feed.set_state(state)
    del state["lanes"]["1"]
    with (
        Feed(lanes_of([20, 20]), 8, sharding) as feed,
        pytest.raises(ValueError, match=r"lacks lane 1 \(1 of 2 are missing\).*feedline.save_lanes"),
    ):
        feed.set_state(state)


WRONG = [
    (None, "at position 8 every lane has begun, and lane 1 has no state; pass what"),
    ({}, r"lane 1 cannot go on from its state \{\}: .*it must have the keys .*, and has \[\]. Pass the state"),
    ([3], r"lane 1 cannot go on from its state \[3\]: set_state"),
    ({"next_index": 1.5}, "lane 1 cannot go on from .* TypeError: next_index must be of type int, and is 1.5"),
    ({"next_index": 99}, "lane 1 cannot go on from .* IndexError: .* 99 is out of range for dataset of length 20"),
]


def go_on_from(feed, state):
    """Set a state and take a batch: `set_state` raises for some wrong states, `next` for the others."""
    feed.set_state(state)
    return next(feed)


@pytest.mark.parametrize(("lane", "message"), WRONG)
def test_a_lane_with_a_wrong_state_is_named_and_continues_from_the_right_one(sharding, lane, message):
    with Feed(lanes_of([20, 20]), 8, sharding, epochs=1) as feed:
        next(feed)
        state = json.loads(json.dumps(feed.get_state()))
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                go_on_from(feed, {**state, "lanes": {**state["lanes"], "1": lane}})
        feed.set_state(state)
        assert [seen_of(batch)[0][0] for batch in feed] == [4, 8, 12, 16]


def _rows(lane, count):
    numbers = grain.MapDataset.range(lane, 150 + 60 * lane, count).seed(lane).shuffle()
    return numbers.map(lambda i: {"x": np.full(3 + i % 5, i, np.int32)}).to_iter_dataset(grain.ReadOptions(2, 4))


def _scalars(lane, count):
    return _rows(lane, count).map(lambda row: {"x": row["x"][0]})


def _even(row):
    return row["x"] % 2 == 0


KINDS = {
    "packing": lambda lane, count: grain.experimental.FirstFitPackIterDataset(
        _rows(lane, count), length_struct={"x": 16}, num_packing_bins=4
    ).map(lambda row: {"x": row["x"]}),
    "concatenated": lambda lane, count: grain.experimental.ConcatThenSplitIterDataset(
        _rows(lane, count), length_struct={"x": 16}
    ).map(lambda row: {"x": row["x"]}),
    "mixture": lambda lane, count: grain.IterDataset.mix(
        [_scalars(lane, count).filter(_even), _scalars(lane, count)], [0.7, 0.3]
    ),
    "window shuffle": lambda lane, count: grain.experimental.WindowShuffleIterDataset(
        _scalars(lane, count), window_size=7, seed=1
    ),
    "threads": lambda lane, count: grain.experimental.ThreadPrefetchIterDataset(
        _scalars(lane, count), prefetch_buffer_size=3
    ),
    "repeated": lambda lane, count: grain.experimental.RepeatIterDataset(_scalars(lane, count), 2),
    "interleaved": lambda lane, count: grain.experimental.InterleaveIterDataset(
        [  # these take the same place in the state one by one; their states have different forms
            _scalars(lane, count),
            grain.experimental.LimitIterDataset(_scalars(lane, count), 30),
            _scalars(lane, count).seed(1).random_map(lambda row, random: row),
        ],
        cycle_length=2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_lanes_of_grains_own_transformations_are_resumed_exactly(sharding, kind):
    def feed():
        return Feed(Lanes(KINDS[kind], 2), 8, sharding, epochs=1, remainder="pad")

    states = []
    with feed() as one:
        whole = []
        for batch in one:
            whole.append(jax.tree.map(np.asarray, batch))
            states.append(json.loads(json.dumps(one.get_state())))
    assert len(whole) > 5
    assert not whole[-1]["valid"].all()
    cuts = (1, len(whole) // 2, len(whole) - 1, len(whole))  # lane 0 ends before lane 1 does
    for cut in range(1, len(whole) + 1) if kind == "concatenated" else cuts:
        with feed() as one:
            one.set_state(states[cut - 1])
            rest = [jax.tree.map(np.asarray, batch) for batch in one]
        assert len(rest) == len(whole) - cut
        jax.tree.map(np.testing.assert_array_equal, rest, whole[cut:])


def test_a_program_that_parses_no_flags_may_use_grains_workers():
    """Grain reads absl's flags, to pass them to workers of `mp_prefetch`; unparsed flags cannot be read."""
    parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.unparse_flags()
    try:
        lanes_of([2]).open(0).close()
        assert flags.FLAGS.is_parsed()
    finally:
        if parsed:
            flags.FLAGS.mark_as_parsed()
