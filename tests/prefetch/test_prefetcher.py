"""The placement thread, and what reading threads and its synchronous double share with it: order, errors, ends."""

import gc
import queue
import threading
import traceback
import weakref

import pytest
from background import PATIENCE_S, arrived, left_behind, spawn

from feedline import Reading
from feedline._src.prefetch.handover import Closed
from feedline._src.prefetch.pipelines import Prefetcher, Readers, Synchronous
from feedline._src.prefetch.watch import Watch


class Steps:
    """A watch that waits for ever, and lets the test follow the placement thread step by step."""

    def __init__(self):
        self._stages = queue.SimpleQueue()
        self.consumer_waits = threading.Event()
        self.asked = 0

    def advanced(self, stage):
        self._stages.put(stage)

    def waits(self):
        pass

    def stop(self):
        pass

    def patience_s(self):
        self.asked += 1
        self.consumer_waits.set()

    def expect(self, *stages):
        """Wait until the placement thread has gone through exactly these."""
        for stage in stages:
            assert self._stages.get(timeout=PATIENCE_S) == stage


class Source:
    """Gives its items, and raises those that are exceptions; `gate` is waited for before the item `gated`."""

    parts = 1  # for reading threads, of which one reads the items in order

    def __init__(self, *items, gated=None, on_close=None):
        self._items = iter(items)
        self.count = len(items)
        self._gated = gated
        self._on_close = on_close
        self.inside, self.gate = threading.Event(), threading.Event()
        self.closed_by = []

    def __next__(self):
        item = next(self._items, StopIteration("rest"))
        if item == self._gated:
            self.inside.set()
            arrived(self.gate)
        if isinstance(item, BaseException):
            raise item
        return item

    def read(self, number, part):
        return next(self)

    def end(self):
        return StopIteration("rest")

    def close(self):
        self.closed_by.append(threading.current_thread().name)
        if self._on_close is not None:
            raise self._on_close


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.enumerate()
    yield
    assert left_behind(before) == []


def prefetcher(source, place=str, depth=2, watch=None):
    run = Prefetcher(source, place, depth, watch or Steps())
    run.start()
    return run


KINDS = {
    "thread": lambda source, place: Prefetcher(source, place, 2, Watch(Reading())),
    "readers": lambda source, place: Readers(source, place, 2, Watch(Reading()), threads=1, ahead=2),
    "none": lambda source, place: Synchronous(source, place, Watch(Reading())),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def run_of(request):
    """What all kinds promise alike."""

    def run_of(source, place=str):
        run = request.param(source, place)
        run.start()
        return run

    return run_of


def test_items_come_in_order_and_then_the_end_with_its_value(run_of):
    source = Source(*range(20))
    run = run_of(source)
    assert [run.take() for _ in range(20)] == [str(i) for i in range(20)]
    with pytest.raises(StopIteration) as end:
        run.take()
    assert end.value.value == "rest"
    run.close()
    assert run.join(PATIENCE_S) is None


@pytest.mark.parametrize("stage", ["read", "place"])
def test_an_error_comes_after_the_good_items_with_its_traceback(run_of, stage):
    def place_that_fails(host):
        if host == "bad":
            raise KeyError("of place")
        return host

    run = run_of(Source("a", "b", KeyError("of read") if stage == "read" else "bad"), place_that_fails)
    assert [run.take(), run.take()] == ["a", "b"]
    with pytest.raises(KeyError, match=f"of {stage}") as caught:
        run.take()
    told = "".join(traceback.format_exception(caught.value))
    assert ("in __next__" if stage == "read" else "in place_that_fails") in told
    run.close()


def test_a_stop_iteration_of_place_does_not_pass_for_the_end(run_of):
    run = run_of(Source("a"), lambda host: next(iter([])))
    with pytest.raises(RuntimeError, match="placing a batch raised StopIteration"):
        run.take()
    run.close()


def test_nothing_comes_after_close(run_of):
    source = Source("a", "b", "c")
    run = run_of(source)
    assert run.take() == "a"
    run.close()
    run.close()
    with pytest.raises(Closed):
        run.take()
    assert run.join(PATIENCE_S) is None
    assert run.waiting == 0


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_exactly_depth_placed_items_wait(depth):
    steps, placed, taken = Steps(), 0, 0

    def place(host):
        nonlocal placed
        assert placed - taken < depth
        placed += 1
        return host

    source = Source(*range(20))
    run = prefetcher(source, place, depth, steps)
    steps.expect(*["read", "wait", "place"] * depth, "read", "wait")
    for item in range(20 - depth - 1):
        assert (placed, run.waiting) == (item + depth, depth)
        taken += 1  # before `take`, which lets the placement thread go on
        assert run.take() == item
        steps.expect("place", "read", "wait")
    run.close()  # while it waits for a slot
    assert run.join(PATIENCE_S) is None
    assert source.closed_by == ["feedline-place"]


def test_an_error_that_was_handled_keeps_nothing_alive(run_of):
    class BadRow(Exception):
        pass

    def place(host):
        raise BadRow

    run = run_of(Source("a"), place)
    gc.disable()  # counting references must do
    try:
        run.take()
    except BadRow as caught:
        error = weakref.ref(caught)
    finally:
        gc.enable()
    run.close()
    assert run.join(PATIENCE_S) is None
    assert error() is None


def test_close_while_the_consumer_waits():
    steps, source = Steps(), Source("a", gated="a")
    run = prefetcher(source, watch=steps)
    taken = spawn(run.take)
    arrived(source.inside)
    arrived(steps.consumer_waits)
    run.close()
    with pytest.raises(Closed):
        taken.result(PATIENCE_S)
    assert run.join(0) == "feedline-place"  # still inside the read
    source.gate.set()
    assert run.join(PATIENCE_S) is None
    assert source.closed_by == ["feedline-place"]


def test_a_read_of_a_stream_is_waited_for_whoever_joins():
    source = Source("a", gated="a")
    run = prefetcher(source)
    arrived(source.inside)
    run.close()
    joining = spawn(lambda: run.join(PATIENCE_S, reads=False))
    with pytest.raises(TimeoutError):
        joining.result(0.05)
    source.gate.set()
    assert joining.result(PATIENCE_S) is None


@pytest.mark.parametrize("stage", ["read", "place"])
def test_the_placement_thread_may_close_it(stage):
    told = []

    def close():
        run.close()
        told.append(run.join(PATIENCE_S))

    class Closing(Source):
        def __next__(self):
            if stage == "read":
                close()
            return super().__next__()

    source = Closing("a", "b")
    run = Prefetcher(source, lambda host: close() if stage == "place" else host, 2, Steps())
    run.start()
    assert run.join(PATIENCE_S) is None
    assert told == ["feedline-place"]  # it does not wait for itself
    assert source.closed_by == ["feedline-place"]
    with pytest.raises(Closed):
        run.take()


def test_an_error_in_closing_takes_the_place_of_the_end():
    run = prefetcher(Source("a", on_close=OSError("disk")))
    assert run.take() == "a"
    with pytest.raises(OSError, match="disk"):
        run.take()


def test_an_error_in_closing_is_noted_on_the_error_before_it():
    run = prefetcher(Source(KeyError("bad row"), on_close=OSError("disk")))
    with pytest.raises(KeyError, match="bad row") as caught:
        run.take()
    assert caught.value.__notes__ == ["feedline: closing the source failed, too: OSError('disk')"]
