"""Reading threads that place what they read: order, depth, memory, errors, ends and every way to close."""

import collections
import random
import threading
import time
import traceback
import weakref

import pytest
from background import PATIENCE_S, arrived, left_behind, spawn

from feedline import Reading
from feedline._src.prefetch.handover import Closed
from feedline._src.prefetch.pipelines import Readers
from feedline._src.prefetch.watch import Watch


class Batches:
    """Batches 0 … count − 1 of some parts. `reads` is called with the number and the part of each."""

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


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.enumerate()
    yield
    assert left_behind(before) == []


def readers(batches, place=lambda host: host, depth=2, threads=2, ahead=3):
    run = Readers(batches, place, depth, Watch(Reading()), threads=threads, ahead=ahead)
    run.start()
    return run


def ended(run):
    with pytest.raises(StopIteration) as end:
        run.take()
    run.close()
    assert run.join(PATIENCE_S) is None
    return end.value.value


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
    assert most_placed <= depth + 1  # 1: `take` has it, and the test has not noted that yet


@pytest.mark.parametrize("threads", [1, 2])
def test_all_batches_ahead_are_read_while_the_consumer_is_busy(threads):
    """However few threads read: a batch that waits for its slot keeps no other from being read."""
    read = threading.Semaphore(0)
    batches = Batches(20, 1, lambda number, part: read.release())
    run = readers(batches, depth=2, threads=threads, ahead=5)
    for _ in range(2 + 5):
        assert read.acquire(timeout=PATIENCE_S)
    assert not read.acquire(timeout=0.05)
    run.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_more_than_so_many_threads_read_at_a_time(threads):
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
    began = time.monotonic()
    assert [run.join(PATIENCE_S, reads=False)] == names  # it reads, and is not waited for
    assert time.monotonic() - began < PATIENCE_S / 2
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
        time.sleep(0.002 * (number < bad))  # later ones fail first
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
