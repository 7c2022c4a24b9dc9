"""After `feed.set_weights`, also after a restore, rows are those of a mixture built with the same phases."""

import itertools
import json
import pickle

import jax
import numpy as np
import pytest
from test_feed_lifecycle import interrupted_at

from feedline import Feed, Mixture

SOURCES = {"a": {"x": np.arange(100)}, "b": {"x": np.arange(100, 200)}}
BEFORE, AFTER, LATER = {"a": 1, "b": 1}, {"a": 1, "b": 3}, {"a": 3, "b": 1}
PLANNED = [(0, BEFORE), (64, LATER)]


def taken(feed, count):
    return [np.asarray(batch["x"]).tolist() for batch in itertools.islice(feed, count)]


@pytest.mark.parametrize("weights", [BEFORE, PLANNED], ids=["one phase", "a curriculum"])
@pytest.mark.parametrize("workers_and_prefetch", [0, 2])
def test_rows_are_those_of_a_mixture_with_this_phase(weights, workers_and_prefetch, sharding):
    phases = sorted([*([(0, weights)] if weights is BEFORE else weights), (24, AFTER)], key=lambda phase: phase[0])
    with Feed(Mixture(SOURCES, phases), 8, sharding) as feed:
        expected, end = taken(feed, 10), feed.get_state()
    with Feed(Mixture(SOURCES, weights), 8, sharding, prefetch=workers_and_prefetch) as feed:
        found = taken(feed, 3)
        feed.set_weights(AFTER)
        states = [feed.get_state()]
        for count in (3, 4):
            found += taken(feed, count)
            states.append(feed.get_state())
    assert found == expected
    assert states[-1] == end
    for state, done in zip(states, (3, 6), strict=False):
        with Feed(Mixture(SOURCES, weights), 16, sharding) as feed:  # with the weights that the program began with
            np.testing.assert_array_equal(feed.rows_of(state), np.concatenate(expected[done : done + 2]))
            feed.set_state(json.loads(json.dumps(state)))
            rows = np.concatenate(taken(feed, 2))
            np.testing.assert_array_equal(rows, np.concatenate(expected[done : done + 4]))
            feed.set_state(states[0])
            assert feed.rows_of(states[0]).tolist() == feed.rows_of(feed.get_state()).tolist()


def test_a_restore_keeps_to_the_weights_that_a_program_gives_for_later(sharding):
    with Feed(Mixture(SOURCES, BEFORE), 8, sharding) as feed:
        taken(feed, 3)
        feed.set_weights(AFTER)
        taken(feed, 1)
        state = feed.get_state()
    both = [(0, BEFORE), (24, AFTER), (32, LATER)]
    with Feed(Mixture(SOURCES, both), 8, sharding) as feed:
        taken(feed, 4)
        expected = taken(feed, 3)
    with Feed(Mixture(SOURCES, [(0, BEFORE), (32, LATER)]), 8, sharding) as feed:
        feed.set_state(state)
        assert taken(feed, 3) == expected
    with Feed(Mixture(SOURCES, LATER), 8, sharding) as feed, pytest.raises(ValueError, match="order"):
        feed.set_state(state)


@pytest.mark.parametrize(
    "weights",
    [BEFORE, {"a": 755_412_340, "b": 950_513_232}],
    ids=["a small block", "a block that nears the shares"],
)
def test_a_feed_goes_to_a_state_whatever_was_set_since(weights, sharding):
    with Feed(Mixture(SOURCES, weights), 8, sharding) as feed:
        taken(feed, 3)
        states, rows = [feed.get_state()], []
        for later in (AFTER, LATER):
            feed.set_state(states[0])
            feed.set_weights(later)
            taken(feed, 2)
            states.append(feed.get_state())
            rows.append(taken(feed, 2))
        for state, expected in zip(states[1:], rows, strict=True):
            feed.set_state(json.loads(json.dumps(state)))
            assert taken(feed, 2) == expected
        feed.set_state(states[0])
    with Feed(Mixture(SOURCES, weights), 8, sharding) as feed:
        feed.set_state(states[1])
        assert taken(feed, 2) == rows[0]


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_restore_leaves_it_done_or_undone(sharding):
    ways = {"undone": set(), "done": set()}
    for line in range(1, 2000):
        with Feed(Mixture(SOURCES, BEFORE), 8, sharding) as feed:
            state = feed.get_state()
            taken(feed, 3)
            feed.set_weights(AFTER)
            taken(feed, 2)
            where, _ = interrupted_at(line, lambda: feed.set_state(state))  # noqa: B023
            ways["undone" if feed.get_state()["step"] else "done"].add(str(taken(feed, 4)))
        if where is None:
            break
    assert 40 < line < 1999
    assert {way: len(rows) for way, rows in ways.items()} == {"undone": 1, "done": 1}


def test_weights_that_were_set_travel_to_workers():
    mixture = Mixture(SOURCES, {"a": 755_412_340, "b": 950_513_232})
    changed = mixture.with_weights(AFTER, 24)
    copy = pickle.loads(pickle.dumps(changed))
    assert copy.order.as_json() == changed.order.as_json()
    assert changed.order.phases[0] == mixture.order.phases[0]


@pytest.mark.parametrize(
    ("source", "weights", "error", "message"),
    [
        (SOURCES["a"], BEFORE, TypeError, "only a feedline.Mixture"),
        (Mixture(SOURCES, BEFORE, end="first_exhausted"), AFTER, ValueError, 'only with end="endless"'),
        (Mixture(SOURCES, BEFORE), {"a": 1}, ValueError, "'b'"),
        (Mixture(SOURCES, BEFORE), {"a": -1, "b": 1}, ValueError, "not negative"),
    ],
)
def test_what_does_not_suit_is_refused_and_the_feed_goes_on(source, weights, error, message, sharding):
    with Feed(source, 8, sharding) as feed, Feed(source, 8, sharding) as other:
        next(feed)
        with pytest.raises(error, match=message):
            feed.set_weights(weights)
        assert taken(feed, 2) == taken(other, 3)[1:]


def test_where_the_program_gives_weights_it_is_refused():
    """Otherwise a program that restores a state from this position would continue with the weights in its code."""
    with Feed(Mixture(SOURCES, PLANNED), 8, jax.devices()[0]) as feed:
        for position in (0, 64):
            feed.seek(0, position)
            with pytest.raises(ValueError, match=rf"from position {position} on were given to Mixture"):
                feed.set_weights(AFTER)
        taken(feed, 1)
        feed.set_weights(AFTER)
        feed.close()
        with pytest.raises(ValueError, match="closed"):
            feed.set_weights(AFTER)
