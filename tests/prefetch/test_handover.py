"""The guarantees of the hand-over, in every order in which the two sides and the closing can take turns."""

import sys

import pytest
from background import PATIENCE_S, spawn
from hypothesis import given, settings
from hypothesis import strategies as st
from interleave import Deadlock, Queue, Turns, all_orders

from feedline.prefetch.handover import Closed, Empty, Handover

END = "end"


class Stepwise(Handover):
    """A hand-over of which each access to shared state is a turn."""

    def __init__(self, depth, turns):
        self._turns = turns
        self.flag = False
        super().__init__(depth)
        self._slots = Queue(turns, [None] * depth)
        self._items = Queue(turns)

    @property
    def _closed(self):
        self._turns.step()
        return self.flag

    @_closed.setter
    def _closed(self, value):
        self._turns.step()
        self.flag = value

    @property
    def kept(self):
        return [entry for entry in self._items.items if entry is not None]


class Scene:
    """A producer of `count` items and an end, a consumer, and one who closes; what each of them saw."""

    def __init__(self, choose, depth, count):
        self.turns = Turns(choose)
        self.handover = Stepwise(depth, self.turns)
        self.depth = depth
        self.whole = [*range(count), END]
        self.made = 0
        self.taken = []
        self.closed = False  # a close has returned

    def produce(self):
        for item in self.whole[:-1]:
            if not self.reserve():
                return
            self.made += 1
            assert (
                self.made - len(self.taken) <= self.depth + 1
            )  # 1: taken out by a `take` that is about to return
            self.handover.put(item)
        self.handover.finish(END)

    def consume(self):
        while END not in self.taken and self.take():
            pass

    def reserve(self):
        closed = self.closed
        reserved = self.handover.reserve()
        assert not (closed and reserved), "a slot was reserved after close"
        return reserved

    def take(self):
        closed = self.closed
        try:
            self.taken.append(self.handover.take(None))
        except Closed:
            return False
        assert not closed, "an item was taken after close"
        return True

    def close(self):
        self.handover.close()
        self.closed = True

    def check(self):
        assert self.taken == (self.whole[: len(self.taken)] if self.closed else self.whole)
        if self.closed:
            assert self.handover.kept == []
            assert not self.reserve()
            assert not self.take()
        else:
            assert len(self.handover._slots.items) == self.depth


def test_every_order_of_producer_and_consumer():
    def check(choose):
        scene = Scene(choose, depth=1, count=1)
        scene.turns.run(produce=scene.produce, consume=scene.consume)
        scene.check()

    assert all_orders(check) > 100


@pytest.mark.parametrize(
    ("other", "ready"),
    [("reserve", 0), ("put", 0), ("put", 1), ("take", 0), ("take", 1), ("take", 2), ("close", 0), ("close", 1)],
)
def test_every_order_of_close_and_another(other, ready):
    def check(choose):
        scene = Scene(choose, depth=1, count=2)
        scene.handover._items.items.extend((item, True) for item in range(ready))
        calls = {
            "put": lambda: scene.handover.put(ready),
            "close": scene.close,
            "take": scene.take,
            "reserve": scene.reserve,
        }
        scene.turns.run(close=scene.close, other=calls[other])
        scene.check()

    assert all_orders(check) >= 10


@given(depth=st.integers(1, 3), count=st.integers(0, 4), closes=st.integers(0, 2), data=st.data())
@settings(max_examples=150, deadline=None)
def test_drawn_orders_of_all_roles(depth, count, closes, data):
    scene = Scene(lambda able: data.draw(st.sampled_from(able)), depth, count)
    closers = {f"close_{i}": scene.close for i in range(closes)}
    scene.turns.run(produce=scene.produce, consume=scene.consume, **closers)
    scene.check()


def test_the_producer_stops_at_exactly_depth_items():
    for depth in (1, 2, 5):
        scene = Scene(lambda able: able[0], depth, depth + 1)
        with pytest.raises(Deadlock, match="'produce'"):
            scene.turns.run(produce=scene.produce)
        assert scene.made == depth == scene.handover.waiting


def test_waiting_counts_items_that_are_ready_and_not_the_end():
    handover = Handover(3)
    for item in "ab":
        handover.reserve()
        handover.put(item)
    assert handover.waiting == 2
    handover.finish(END)
    assert handover.waiting == 2
    assert [handover.take(0), handover.waiting] == ["a", 1]
    handover.close()
    assert handover.waiting == 0


def test_nothing_within_the_time_is_not_the_end():
    handover = Handover(1)
    with pytest.raises(Empty):
        handover.take(0)
    handover.reserve()
    handover.put("late")
    assert handover.take(0) == "late"


@pytest.mark.parametrize("side", ["reserve", "put", "finish", "take"])
def test_a_finalizer_may_close_it_in_the_middle_of_anything(side):
    """At every line that the call runs, in the standard library too, `close` runs before the next one."""

    def closed_at(line):
        handover = Handover(1)
        calls = {"reserve": (), "put": ("a",), "finish": ("a",), "take": (PATIENCE_S,)}
        seen = 0

        def trace(frame, event, _):
            nonlocal seen
            if event == "line":
                seen += 1
                if seen == line:
                    sys.settrace(None)
                    handover.close()
            return trace

        if side == "take":
            handover.finish("a")
        sys.settrace(trace)
        try:
            getattr(handover, side)(*calls[side])
        except Closed:
            pass
        finally:
            sys.settrace(None)
        return seen >= line

    line = 1
    while spawn(lambda: closed_at(line)).result(PATIENCE_S):  # noqa: B023
        line += 1
    assert line > 2
