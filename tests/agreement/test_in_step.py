"""Processes compare batches and moves of a feed at points that all reach: moves, closing, the end."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from real_service import joined

import feedline
from feedline._src.agreement import in_step as module
from feedline._src.agreement.in_step import Count, InStep, LatestValues, Place, counts, ends_differ, more_than

KEY = "feedline/agree/2-a/1"
PLACE = Place(step=5, epoch=2, position=0)


@pytest.fixture(autouse=True)
def no_other_feeds(monkeypatch):
    monkeypatch.setattr(module, "_of_feeds", set())
    monkeypatch.setattr(module, "coordination", lambda: "joined")  # not None; tests pass their own clients
    module._gone.clear()
    module._dropped.clear()


@pytest.fixture(scope="module")
def services():
    with joined(2) as found:
        yield found


@pytest.fixture
def feeds(services, request):
    """The `InStep` of one feed on each of two processes."""
    return [InStep(service, f"{KEY}/{request.node.name}/3", 2) for service in services]


def test_counts_of_feeds_that_are_gone_do_not_pile_up(services):
    training = InStep(services[0], "training", 2)
    for number in range(1000):
        InStep(services[0], f"evaluation {number}", 2).batches = 7
        training.batches += 1
    assert len(counts()) == module._KEPT_FEEDS + 1
    assert counts()["training"] == (1000, 0, False)
    assert counts()["evaluation 999"] == (7, 0, False)
    del training  # as when `main` returns; its counts are compared at the end of the program
    assert counts()["training"] == (1000, 0, False)
    assert more_than({"training": [999, 0], "evaluation 0": [3, 0]}) == (999, 1000)
    assert len(module._of_feeds) == 0


@pytest.mark.parametrize("other", [(12, 0), (14, 0), (13, 1)])
def test_ends_after_other_counts_differ_and_equal_ones_do_not(other):
    feed = InStep(None, KEY, 2)
    feed.batches = 13
    assert ends_differ(0, {KEY: [13, 0], "a feed of others": [7, 0]}, 1) is None
    assert ends_differ(0, {KEY: [*other, True]}, 1) is None  # True: process 0 ended after an error of `next`
    assert f"process 0 took {Count(*other)}, and process 1 took 13 batches; look for" in ends_differ(
        0, {KEY: other}, 1
    )


def test_equal_moves_are_in_step_and_each_is_compared_with_its_own_number(feeds):
    for batches, place in [(5, PLACE), (9, Place(9, 0, 32)), (9, PLACE)]:
        for feed in feeds:
            feed.batches = batches
            assert feed.moved(place) is None
            feed.moves += 1
    assert [feed.count for feed in feeds] == [(9, 3, False)] * 2


@pytest.mark.parametrize(
    ("batches", "place"),
    [
        (6, PLACE),
        (5, PLACE._replace(step=6)),
        (5, PLACE._replace(epoch=3)),
        (5, PLACE._replace(position=8)),
        (5, PLACE._replace(order="1a2b")),
    ],
)
def test_a_move_elsewhere_or_after_other_batches_is_told_as_often_as_it_is_tried(feeds, batches, place):
    feeds[0].batches, feeds[1].batches = 5, batches
    assert feeds[0].moved(PLACE) is None
    for _ in range(2):
        found = feeds[1].moved(place)
        assert "in feed 3 (feeds are numbered as they are built): process 0 went to epoch 2, position 0" in found
        rows = f" in the order {place.order}" if place.order else ""
        assert f"went to epoch {place.epoch}, position {place.position}{rows} after {batches} batches" in found


def test_a_move_counts_once_wherever_it_is_interrupted(feeds):
    """Interrupts each line of `next` in turn. A move counted twice would be one that other processes miss."""
    mover, lines = feeds[0], 0
    while lines is not None:
        lines, left = lines + 1, lines

        def trace(frame, event, _):
            nonlocal left
            left -= event == "line" and frame.f_code.co_filename.endswith(("/feed_base.py", "/in_step.py"))
            if left < 0:
                raise KeyboardInterrupt
            return trace

        mover.key, mover.moves = f"{KEY}/interrupted/{lines}", 0
        with feedline.Feed(np.arange(64), 4, jax.devices()[0], prefetch=0) as feed:
            feed._sizes = feed._sizes.map(lambda stages: dataclasses.replace(stages, in_step=mover))
            next(feed)
            feed.seek(3)
            sys.settrace(trace)
            try:
                next(feed)
                lines = None
            except KeyboardInterrupt:
                next(feed)
            finally:
                sys.settrace(None)
            feed._sizes = feed._sizes.map(lambda stages: dataclasses.replace(stages, in_step=None))
        assert mover.moves == 1


def test_a_missed_move_is_told_once_a_batch_was_taken_without_it(feeds):
    mover, other = feeds
    mover.batches = other.batches = 5
    assert mover.moved(PLACE) is None
    mover.batches = 9
    assert mover.missed_move() is None  # the move is its own
    assert other.missed_move() is None  # it may still make that move
    other.batches = 6
    assert (
        "process 0 went to epoch 2, position 0 after 5 batches, and process 1 took 6 batches without that move"
        in other.missed_move()
    )


@pytest.mark.parametrize("batches", [12, 13])
def test_counts_are_compared_when_a_feed_is_closed_and_then_nothing_of_it_stays(feeds, services, batches):
    for what in ("build/verdict", "gather/0/0/all", "0/replicas/0.64/0"):
        services[0].set(f"{feeds[0].key}/{what}", "null")
    times = LatestValues(services[0], feeds[0].key)
    times.publish("times")
    for feed in feeds:
        feed.batches, feed.moves = 12, 1
        assert feed.moved(PLACE) is None
    feeds[1].batches = batches
    assert feeds[0].closed() is None
    found = feeds[1].closed()
    if batches == 12:
        assert found is None
    else:
        assert "process 0 took 12 batches and made 1 move by" in found
        assert "process 1 took 13 batches and made 1 move by" in found
    assert services[0].dir(feeds[0].key) == {}
    assert times.read() == {0: "times"}  # published times stay, for reports


def test_nothing_stays_of_a_feed_that_all_have_dropped_once_they_build_another(services):
    for service in services:
        for name in ("kept by one", "dropped"):
            service.set(f"{name}/gather/0/{service.process}", "null")
    kept = [InStep(services[0], "kept by one", 2)]
    for service in services:
        InStep(service, "dropped", 2)
    InStep(services[1], "kept by one", 2)
    kept.append(InStep(services[1], "next", 2))
    assert services[0].dir("dropped") == {}
    assert len(services[0].dir("kept by one/gather")) == 2


def test_the_latest_values_of_many_feeds_do_not_pile_up(services):
    module._latest.clear()
    training, *evaluations = (LatestValues(services[0], f"many/{number}") for number in range(201))
    for evaluation in evaluations:
        training.publish("times")
        evaluation.publish("times")
    assert len(services[0].dir("many")) == module._KEPT_FEEDS
    assert training.read() == evaluations[-1].read() == {0: "times"}


def test_threads_that_build_feeds_and_publish_at_once_do_not_disturb_each_other(services, monkeypatch):
    class Latest(dict):
        def __iter__(self):
            return (super().__iter__(), self.setdefault("of another thread"))[0]

    monkeypatch.setattr(module, "_KEPT_FEEDS", 0)
    monkeypatch.setitem(module._latest, services[0].process, Latest())
    InStep(services[0], "at once", 2)
    LatestValues(services[0], "at once").publish("times")


def test_counts_that_an_error_left_are_not_compared_and_later_ones_are(feeds):
    one, other = feeds
    one.batches, other.batches = 12, 11
    other.failed_at = 11  # the error of its `next` was caught, and the feed closed
    assert one.closed() is None
    assert other.closed() is None
    other.batches = 13
    assert other.count == (13, 0, False)
