"""The leaf `place`: one number for all rows of a batch, by which a step finds processes that are out of step."""

import functools

import grain
import jax
import numpy as np
import pytest

import feedline

ROWS = 40
VALUES = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)


def places(batches, size=8):
    """The number of each batch, which all of its rows have."""
    found = []
    for batch in batches:
        assert batch["place"].dtype == np.int32
        assert batch["place"].shape[-1] == size
        (number,) = set(np.asarray(batch["place"]).ravel().tolist())
        found.append(number)
    return found


SOURCES = {
    "arrays": lambda: {"a": VALUES, "z": VALUES},
    "records": lambda: grain.MapDataset.source([{"a": row} for row in VALUES]),
    "stream": lambda: grain.MapDataset.source([{"a": row} for row in VALUES]).to_iter_dataset(),
    "ragged": lambda: feedline.Ragged({"z": (np.arange(ROWS), np.arange(ROWS + 1))}, pad_to=(4, 8)),
    "mixture": lambda: feedline.Mixture({"a": {"x": VALUES}, "b": {"x": VALUES}}, weights={"a": 0.5, "b": 0.5}),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_each_batch_has_a_number_and_it_comes_again_only_with_its_place(source, prefetch, sharding):
    build = functools.partial(feedline.Feed, SOURCES[source](), 8, sharding, prefetch=prefetch, with_place=True)
    with build() as feed, build() as again:
        found = places(batch for _, batch in zip(range(12), feed, strict=False))
        assert len(set(found)) == 12
        state = feed.get_state()
        following = places(batch for _, batch in zip(range(3), feed, strict=False))
        again.set_state(state)
        assert places(batch for _, batch in zip(range(3), again, strict=False)) == following


@pytest.mark.parametrize(
    "options",
    [
        {"remainder": "pad", "epochs": 1},
        {"remainder": "wrap"},
        {"reading": feedline.Reading(bad_rows="mask")},
        {"transform": lambda batch, rows: {"zz": batch["a"] + 1}},
        {"batch_size": [(0, 8), (2, 8)]},
    ],
    ids=["pad", "wrap", "mask", "transform", "sizes"],
)
def test_the_other_leaves_are_those_of_a_feed_without_it(options, sharding):
    options = {"batch_size": 8, **options}
    build = functools.partial(feedline.Feed, {"a": VALUES}, sharding=sharding, **options)
    with build() as plain, build(with_place=True) as feed:
        assert feed.spec["place"] == jax.ShapeDtypeStruct((8,), np.int32, sharding=sharding)
        for _, expected, batch in zip(range(5), plain, feed, strict=False):
            place = batch.pop("place")
            assert len(set(np.asarray(place).tolist())) == 1
            assert jax.tree.map(np.array_equal, expected, batch) == jax.tree.map(lambda _: True, expected)


def test_several_steps_in_one_call_have_one_number(sharding):
    feed = feedline.Feed({"a": VALUES}, 8, sharding, epochs=1, steps_per_call=5, with_place=True)
    with feed:
        (batch,) = feed
        assert batch["place"].shape == (5, 8)
        assert len(places([batch])) == 1
