"""Placed batches from threads and without threads: order, depth, memory, errors, ends, closing."""

import collections
import gc
import random
import threading
import time
import traceback
import weakref

import pytest
from background import PATIENCE_S, arrived, spawn

from feedline import FeedError, Reading
from feedline._src.prefetch.pipelines import Closed, Prefetcher, Synchronous
from feedline._src.prefetch.watch import Watch

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


class Source:
    """Gives its items, and raises those that are exceptions. Waits for `gate` before it gives the item `gated`."""

    parts = 1  # per batch; a single reading thread gets the items in order

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


class Batches:
    """Batches 0 … count − 1, each of `parts` parts. Each read calls `reads(number, part)`."""

    def __init__(self, count, parts=1, reads=lambda number, part: None):
        self.count, self.parts = count, parts
        self._reads = reads
        self._lock = threading.Lock()
        self._missing = collections.Counter()
        self.begun = []  # (number, part), in the order in which reads began

    def read(self, number, part):
        with self._lock:
            self.begun.append((number, part))
        self._reads(number, part)
        with self._lock:
            self._missing[number] += 1
            if self._missing[number] < self.parts:
                return None
            return number

    def end(self):
        return StopIteration("rest")

    def close(self):
        pass


def prefetcher(source, place=str, depth=2):
    """A pipeline in which one thread reads an iterator."""
    run = Prefetcher.of_iterator(source, place, depth, Watch(Reading()))
    run.start()
    return run


def readers(batches, place=lambda host: host, depth=2, threads=2, ahead=3):
    """A pipeline in which several threads read parts of batches."""
    run = Prefetcher(batches, place, depth, Watch(Reading()), threads=threads, ahead=ahead)
    run.start()
    return run


def ended(run):
    with pytest.raises(StopIteration) as end:
        run.take()
    run.close()
    assert run.join(PATIENCE_S) is None
    return end.value.value


KINDS = {
    "thread": lambda source, place: Prefetcher.of_iterator(source, place, 2, Watch(Reading())),
    "readers": lambda source, place: Prefetcher(source, place, 2, Watch(Reading()), threads=1, ahead=2),
    "none": lambda source, place: Synchronous(source, place, Watch(Reading())),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def run_of(request):
    """For tests of what all kinds promise alike."""

    def run_of(source, place=str):
        run = request.param(source, place)
        run.start()
        return run

    return run_of


def test_items_come_in_order_and_then_the_end_with_its_value(run_of):
    run = run_of(Source(*range(20)))
    assert [run.take() for _ in range(20)] == [str(i) for i in range(20)]
    assert ended(run) == "rest"


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
    run = run_of(Source("a", "b", "c"))
    assert run.take() == "a"
    run.close()
    run.close()
    with pytest.raises(Closed):
        run.take()
    assert run.join(PATIENCE_S) is None
    assert run.waiting == 0


def test_an_error_that_was_handled_keeps_nothing_alive(run_of):
    class BadRow(Exception):
        pass

    def place(host):
        raise BadRow

    run = run_of(Source("a"), place)
    gc.disable()  # reference counts alone must free the error
    try:
        run.take()
    except BadRow as caught:
        error = weakref.ref(caught)
    finally:
        gc.enable()
    run.close()
    assert run.join(PATIENCE_S) is None
    assert error() is None


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize(("threads", "parts", "ahead"), [(1, 1, 3), (2, 1, 3), (2, 2, 1), (5, 3, 3), (5, 1, 2)])
def test_batches_come_once_and_in_order_and_are_bounded(depth, threads, parts, ahead):
    chance = random.Random(depth * 100 + threads * 10 + parts)
    naps = [chance.choice([0, 0, 1e-4, 1e-3]) for _ in range(200)]
    lock, read, placed, taken = threading.Lock(), set(), [], []
    most_read = most_placed = 0

    def reads(number, part):
        nonlocal most_read
        with lock:
            read.add(number)
            most_read = max(most_read, len(read) - len(placed))
        time.sleep(naps[number])

    def place(number):
        nonlocal most_placed
        with lock:
            placed.append(number)
            most_placed = max(most_placed, len(placed) - len(taken))
        return number

    run = readers(Batches(200, parts, reads), place, depth, threads, ahead)
    for number in range(200):
        time.sleep(naps[-number])
        assert run.take() == number
        taken.append(number)
    assert ended(run) == "rest"
    assert sorted(placed) == list(range(200))
    assert most_read <= ahead
    assert most_placed <= depth + 1  # + 1: a batch that `take` has, and the test has not noted


@pytest.mark.parametrize("threads", [1, 2])
def test_all_batches_ahead_are_read_while_the_consumer_is_busy(threads):
    """A batch that waits for its slot keeps no other from being read, however few threads read."""
    read = threading.Semaphore(0)
    batches = Batches(20, 1, lambda number, part: read.release())
    run = readers(batches, depth=2, threads=threads, ahead=5)
    for _ in range(2 + 5):
        assert read.acquire(timeout=PATIENCE_S)
    assert not read.acquire(timeout=0.05)
    run.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_at_most_the_given_number_of_threads_read_at_a_time(threads):
    lock, inside, most = threading.Lock(), 0, 0

    def reads(number, part):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(1e-3)
        with lock:
            inside -= 1

    run = readers(Batches(50, 1, reads), threads=threads, ahead=6)
    assert [run.take() for _ in range(50)] == list(range(50))
    ended(run)
    assert most <= threads


def test_without_reads_a_join_waits_for_no_read():
    inside, gate, names = threading.Event(), threading.Event(), []

    def reads(number, part):
        names.append(threading.current_thread().name)
        inside.set()
        arrived(gate)

    run = readers(Batches(9, 1, reads), threads=1)
    arrived(inside)
    run.close()
    joining = spawn(lambda: run.join(9 * PATIENCE_S, reads=False))
    assert [joining.result(2 * PATIENCE_S)] == names  # the thread still reads, and the join did not wait
    assert [run.join(0.1)] == names
    gate.set()
    assert run.join(PATIENCE_S) is None


@pytest.mark.parametrize("stage", ["read", "place"])
@pytest.mark.parametrize("bad", [0, 1, 5])
@pytest.mark.parametrize(("threads", "parts"), [(1, 1), (3, 1), (3, 2)])
def test_an_error_comes_after_all_good_batches_before_it(stage, bad, threads, parts):
    def fail(number):
        if number >= bad:  # those after it, too
            raise KeyError(f"batch {number}")

    def reads(number, part):
        time.sleep(0.002 * (number < bad))  # later batches fail first
        if stage == "read":
            fail(number)

    def place(number):
        if stage == "place":
            fail(number)
        return number

    run = readers(Batches(9, parts, reads), place, depth=5, threads=threads)
    assert [run.take() for _ in range(bad)] == list(range(bad))
    with pytest.raises(KeyError, match=f"batch {bad}") as caught:
        run.take()
    assert "in fail" in "".join(traceback.format_exception(caught.value))
    run.close()
    assert run.join(PATIENCE_S) is None


def test_close_while_all_threads_wait_for_a_slot():
    full, placed = threading.Semaphore(0), []
    run = readers(Batches(20, 1, lambda number, part: full.release()), placed.append, depth=1, threads=3, ahead=4)
    for _ in range(4):
        assert full.acquire(timeout=PATIENCE_S)
    run.close()
    run.close()
    assert run.join(PATIENCE_S) is None
    assert len(placed) <= 1
    with pytest.raises(Closed):
        run.take()


def test_a_close_that_is_repeated_while_a_thread_is_stuck_costs_nothing():
    """A feed closes an abandoned pipeline again with each batch; what `close` queues must not pile up."""
    inside, gate, stops = threading.Event(), threading.Event(), []
    run = readers(Batches(9, 1, lambda number, part: (inside.set(), arrived(gate))), threads=1)
    run._watch.on_stop = lambda: stops.append(None)
    arrived(inside)
    for _ in range(1000):
        run.close()
    assert len(stops) == 1
    assert run._claims.qsize() + run._permits.qsize() < 20
    gate.set()
    assert run.join(PATIENCE_S) is None


def test_a_limit_of_threads_is_named(monkeypatch):
    def start(thread, start=threading.Thread.start):
        if thread.name == "feedline-read-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    run = Prefetcher(Batches(9), str, 2, Watch(Reading()), threads=2, ahead=3)
    try:
        raise KeyError  # as in a loop that goes on after an error
    except KeyError:
        with pytest.raises(FeedError, match=r"of these 4 only 2 could be started .*pids.max"):
            run.start()
    run.close()
    assert run.join(PATIENCE_S) is None


def test_an_interrupt_in_the_start_of_a_thread_stays_an_interrupt(monkeypatch):
    def start(thread):
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()  # as `Thread.start` does after an interrupt

    run = Prefetcher(Batches(9), str, 2, Watch(Reading()), threads=2, ahead=3)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run.start()
    run.close()


def test_a_join_waits_for_a_thread_that_is_being_started():
    inside, gate = threading.Event(), threading.Event()
    run = Prefetcher.of_iterator(Source("a"), str, 2, Watch(Reading()))
    run._threads[0]._set_native_id = lambda: (inside.set(), arrived(gate))  # runs before other threads can join it
    starting = spawn(run.start)
    arrived(inside)
    run.close()
    opening = spawn(lambda: time.sleep(0.05) or gate.set())
    assert [run.join(PATIENCE_S), starting.result(PATIENCE_S), opening.result(PATIENCE_S)] == [None] * 3


@pytest.mark.parametrize("stage", ["read", "place"])
def test_close_while_a_thread_is_busy_names_it_and_lets_go_of_what_it_makes(stage):
    inside, gate, items = threading.Event(), threading.Event(), weakref.WeakSet()

    class Item:
        pass

    def busy(here):
        if stage == here:
            inside.set()
            arrived(gate)

    def place(host):
        busy("place")
        items.add(item := Item())
        return item

    run = readers(Batches(9, 1, lambda number, part: busy("read")), place, threads=1)
    taken = spawn(run.take)
    arrived(inside)
    run.close()
    with pytest.raises(Closed):
        taken.result(PATIENCE_S)
    assert run.join(0.1).startswith("feedline-read-")
    gate.set()
    assert run.join(PATIENCE_S) is None
    assert len(items) == 0


# --- an iterator, which one thread reads and closes ---


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_thread_over_an_iterator_places_depth_items_and_reads_one_more(depth):
    read, placed, closed_by = threading.Semaphore(0), [], []

    def items():
        for item in range(20):
            read.release()
            yield item

    class Items:
        __next__ = items().__next__

        def close(self):
            closed_by.append(threading.current_thread().name)

    run = prefetcher(Items(), placed.append, depth)
    for _ in range(depth + 1):
        assert read.acquire(timeout=PATIENCE_S)
    assert not read.acquire(timeout=0.05)
    assert (placed, run.waiting) == ([*range(depth)], depth)
    run.take()
    assert read.acquire(timeout=PATIENCE_S)
    run.close()  # while the thread waits for a slot
    assert run.join(PATIENCE_S) is None
    assert closed_by == ["feedline-place"]


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
    told, started = [], threading.Event()

    def close():
        arrived(started)
        run.close()
        told.append(run.join(PATIENCE_S))

    class Closing(Source):
        def __next__(self):
            if stage == "read":
                close()
            return super().__next__()

    source = Closing("a", "b")
    run = prefetcher(source, lambda host: close() if stage == "place" else host)
    started.set()
    assert run.join(PATIENCE_S) is None
    assert told == ["feedline-place"]  # the thread does not wait for itself
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
