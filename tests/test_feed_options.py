"""`FeedOptions`, and the context manager `building`, in which tools change the options of each feed."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

from feedline import Feed, FeedOptions, Reading, building

ROWS = {"x": np.arange(64, dtype=np.int32)}
DEVICE = jax.devices()[0]


def test_a_feed_has_the_arguments_and_defaults_of_its_options():
    of_feed = [(p.name, p.default) for p in inspect.signature(Feed).parameters.values()]
    of_options = [(p.name, p.default) for p in inspect.signature(FeedOptions).parameters.values()]
    assert of_feed == of_options


def test_a_feed_of_options_delivers_what_one_of_arguments_does(delivered):
    options = FeedOptions(ROWS, 8, DEVICE, epochs=1, prefetch=np.int64(3))
    feed = Feed.from_options(options)
    assert feed.options is options
    assert (options.prefetch, type(options.prefetch), options.sizes[0][1]) == (3, int, 8)
    assert [b["x"].tolist() for b in delivered(feed)] == [
        b["x"].tolist() for b in delivered(Feed(ROWS, 8, DEVICE, epochs=1))
    ]


def test_options_are_checked_when_they_are_made_and_do_not_change():
    with pytest.raises(ValueError, match="prefetch must be at least 0, got -1"):
        FeedOptions("missing.npy", 8, DEVICE, prefetch=-1)
    with pytest.raises(TypeError, match=r"sharding\['x'\] must be a jax\.sharding\.Sharding, got 'data'"):
        FeedOptions("missing.npy", 8, {"x": "data"})
    with pytest.raises(TypeError, match=r"Reading\.quarantine must be the path of a file, got b'bad'"):
        Reading(bad_rows="mask", quarantine=b"bad")
    with pytest.raises(TypeError, match=r"built from a feedline\.FeedOptions, got None"):
        Feed.from_options(None)
    options = FeedOptions("missing.npy", [(0, 8), (4, 16)], DEVICE)  # no source is opened
    assert options.sizes[0][1] == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.epochs = 2


def test_every_feed_that_is_built_goes_through_the_contexts():
    def half(options):
        seen.append(options.batch_size)
        return dataclasses.replace(options, batch_size=options.batch_size // 2)

    seen = []
    with building(half), building(half):
        one, two = Feed(ROWS, 16, DEVICE), Feed.from_options(FeedOptions(ROWS, 32, DEVICE))
    with one, two:
        assert (one.options.batch_size, two.options.batch_size) == (4, 8)
        assert next(two)["x"].shape == (8,)
    with Feed(ROWS, 16, DEVICE) as feed:
        assert feed.batch_size == 16
    assert seen == [16, 8, 32, 16]


def test_a_context_may_refuse_a_feed_and_sees_what_a_refused_one_asked_for():
    def refuse(options):
        asked.append(options)
        raise ValueError("not this one")

    asked = []
    with pytest.raises(ValueError, match="not this one"), building(refuse):
        Feed(ROWS, 8, DEVICE)
    with (
        building(lambda options: asked.append(options) or options),
        pytest.raises(ValueError, match="at least one"),
    ):
        Feed(np.zeros((0, 2)), 8, DEVICE)
    assert [options.batch_size for options in asked] == [8, 8]


def test_a_context_is_told_before_each_batch_of_a_feed_that_was_built_in_it():
    asked = []
    with building(asked=lambda feed: asked.append((feed, feed.statistics().batches))):
        feed = Feed(ROWS, 32, DEVICE, epochs=1, reading=Reading(threads=1))
    with feed, Feed(ROWS, 8, DEVICE) as other:
        next(other)
        assert len(list(feed)) == 2
    assert asked == [(feed, 0), (feed, 1), (feed, 2)]
