"""The guarantees of the hand-over, in every order in which producer, consumer and `close` can take turns."""

import gc
import linecache
import sys

import pytest
from background import PATIENCE_S, spawn
from interleave import Queue, Turns, all_orders

from feedline._src.prefetch.pipelines import Closed, Empty, Handover

END = "end"


class Stepwise(Handover):
    """A hand-over in which each access to shared state is a turn."""

    def __init__(self, depth, turns):
        self._turns = turns
        self.flag = False
        self.slotted = 0
        self._signal = lambda: Queue(turns)
        super().__init__(depth)
        self._items = Queue(turns)
        self._early = Early(turns)
        self._waiting = Early(turns)

    @property
    def _closed(self):
        self._turns.step()
        return self.flag

    @_closed.setter
    def _closed(self, value):
        self._turns.step()
        self.flag = value

    @property
    def _slotted(self):  # no turn of its own: who asks for it has just had one
        return self.slotted

    @_slotted.setter
    def _slotted(self, value):
        self._turns.step()
        self.slotted = value

    @property
    def kept(self):
        return [*self._early.items(), *(entry for entry in self._items.items if entry is not None)]


class Early(dict):
    """A dict in which each change is a turn."""

    def __init__(self, turns):
        super().__init__()
        self._turns = turns

    def __setitem__(self, key, value):
        self._turns.step()
        super().__setitem__(key, value)

    def pop(self, *args):
        self._turns.step()
        return super().pop(*args)

    def clear(self):
        self._turns.step()
        super().clear()


class Scene:
    """A producer of `count` items and an end, a consumer, and a thread that closes, with what each of them saw."""

    def __init__(self, choose, depth, count):
        self.turns = Turns(choose)
        self.handover = Stepwise(depth, self.turns)
        self.depth = depth
        self.whole = [*range(count), END]
        self.made = set()
        self.taken = []
        self.closed = False  # whether a `close` has returned

    def produce(self):
        for item in self.whole[:-1]:
            if not self.wait_for_slot(item):
                return
            self.make(item)
        self.handover.finish(len(self.whole) - 1, END)

    def make(self, item):
        self.made.add(item)
        # + 1: an item in a `take` that is about to return
        assert len(self.made) - len(self.taken) <= self.depth + 1
        assert item <= len(self.taken) + self.depth
        self.handover.put(item, item)

    def consume(self):
        while END not in self.taken and self.take():
            pass

    def wait_for_slot(self, item=0):
        closed = self.closed
        has_slot = self.handover.wait_for_slot(item)
        assert not (closed and has_slot), "an item was to be made after close"
        return has_slot

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
            assert not self.wait_for_slot()
            assert not self.take()
        assert self.handover._waiting == {}


@pytest.mark.slow
def test_every_order_of_producer_and_consumer():
    def check(choose):
        scene = Scene(choose, depth=1, count=1)
        scene.handover._early = {}  # no turns: only the consumer uses it while nobody closes
        scene.turns.run(produce=scene.produce, consume=scene.consume)
        scene.check()

    assert all_orders(check) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "ready"),
    [
        ("wait_for_slot", []),
        ("wait_for_slot_2", []),
        ("put", []),
        ("take", []),
        ("take", [0]),
        ("take", [1]),
        ("take", [1, 0]),
        ("close", []),
        ("close", [1]),
    ],
)
def test_every_order_of_close_and_another(other, ready):
    def check(choose):
        scene = Scene(choose, depth=2, count=2)
        scene.handover._items.items.extend((item, item) for item in ready)
        calls = {
            "put": lambda: scene.handover.put(len(ready), len(ready)),
            "close": scene.close,
            "take": scene.take,
            "wait_for_slot": scene.wait_for_slot,
            "wait_for_slot_2": lambda: scene.wait_for_slot(2),
        }
        scene.turns.run(close=scene.close, other=calls[other])
        scene.check()

    assert all_orders(check) >= 10


def test_an_item_has_a_slot_once_all_but_depth_before_it_were_taken():
    handover = Handover(2)
    assert [handover.wait_for_slot(k, 0.0) for k in range(3)] == [True, True, False]
    handover.put(1, "b")
    with pytest.raises(Empty):
        handover.take(0)
    assert handover.waiting == 1
    handover.put(0, "a")
    assert [handover.take(0), handover.waiting] == ["a", 1]
    assert [handover.wait_for_slot(k, 0.0) for k in (2, 3)] == [True, False]
    assert handover.take(0) == "b"


@pytest.mark.parametrize("side", ["wait_for_slot", "put", "finish", "take"])
def test_a_finalizer_may_close_it_in_the_middle_of_anything(side):
    """`close` is tried before each line that the call runs, also before lines of the standard library."""

    def closed_at(line):
        handover = Handover(1)
        calls = {"wait_for_slot": (1,), "put": (0, "a"), "finish": (0, "a"), "take": (PATIENCE_S,)}
        seen, waits = 0, False

        def trace(frame, event, _):
            nonlocal seen, waits
            if event == "line":
                seen += 1
                if seen == line:
                    waits = "woken.get(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                    sys.settrace(None)
                    handover.close()
            return trace

        if side == "take":
            handover.finish(0, "a")
        gc.disable()  # lines of finalizers would count, too
        sys.settrace(trace)
        try:
            getattr(handover, side)(*calls[side])
        except Closed:
            pass
        finally:
            sys.settrace(None)
            gc.enable()
        return seen >= line and not waits  # a call that waits for a slot runs no further line

    line = 1
    while spawn(lambda: closed_at(line)).result(PATIENCE_S):  # noqa: B023
        line += 1
    assert line > 2
