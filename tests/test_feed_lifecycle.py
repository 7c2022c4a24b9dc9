"""The life of a feed: threads, errors, interrupts, close. Nothing is lost, and no thread is left."""

import gc
import logging
import threading

import jax
import numpy as np
import pytest
from background import PATIENCE_S, arrived, left_behind, spawn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feedline import Feed, Order, Reading, RowError, StallError
from feedline.prefetch.prefetcher import Prefetcher

SHARDING = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
IN_ORDER = Order(shuffle=False)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.enumerate()
    yield
    gc.collect()
    assert not left_behind(before)


class Rows:
    """Row i holds i. Before a read of row `gate` it says so by `inside` and waits for `go`."""

    def __init__(self, count=64, gate=None, fault=None):
        self.spec = jax.ShapeDtypeStruct((), np.int32)
        self.identity = {"count": count}
        self.count, self.gate, self.fault = count, gate, fault
        self.inside, self.go = threading.Event(), threading.Event()

    def __len__(self):
        return self.count

    def read(self, rows, out):
        if self.gate in rows and len(rows) > 1:
            self.inside.set()
            assert self.go.wait(PATIENCE_S)
            fault, self.fault = self.fault, None
            if fault is not None:
                raise fault
        out[:] = rows

    def close(self):
        raise AssertionError("a source that was given is the giver's to close")


def firsts(feed, count):
    return [int(batch[0]) for _, batch in zip(range(count), feed, strict=False)]


def test_a_synchronous_feed_starts_no_thread():
    before = threading.active_count()
    with Feed(np.arange(64), 8, SHARDING, prefetch=0, order=IN_ORDER) as feed:
        assert firsts(feed, 3) == [0, 8, 16]
        assert threading.active_count() == before
        assert feed.statistics().threads == 0


def test_no_thread_starts_before_the_first_batch_is_asked_for():
    before = threading.active_count()
    with Feed(np.arange(64), 8, SHARDING):
        assert threading.active_count() == before


def test_a_second_thread_is_refused_and_the_first_goes_on():
    source = Rows(gate=0)
    with Feed(source, 8, SHARDING, order=IN_ORDER) as feed:
        first = spawn(lambda: next(feed))
        arrived(source.inside)
        for use in (next, lambda f: f.seek(0), lambda f: f.set_state(f.get_state())):
            with pytest.raises(
                ValueError, match="a feed is for one thread at a time, and another thread is inside it"
            ):
                use(feed)
        source.go.set()
        assert int(first.result(PATIENCE_S)[0]) == 0
        assert firsts(feed, 2) == [8, 16]


def test_close_wakes_the_thread_that_waits_for_a_batch():
    source = Rows(gate=0)
    feed = Feed(source, 8, SHARDING, order=IN_ORDER)
    waiting = spawn(lambda: next(feed))
    arrived(source.inside)
    feed.close(timeout_s=0)
    with pytest.raises(ValueError, match="the feed is closed"):
        waiting.result(PATIENCE_S)
    source.go.set()


def test_close_names_a_thread_that_is_stuck_and_a_second_close_is_free(caplog):
    source = Rows(gate=16)
    feed = Feed(source, 8, SHARDING, order=IN_ORDER, reading=Reading(threads=0))
    assert firsts(feed, 2) == [0, 8]
    arrived(source.inside)
    with caplog.at_level(logging.WARNING, logger="feedline"):
        feed.close(timeout_s=0)
    assert "feedline-place is still busy with a read or a transfer 0 s after close" in caplog.text
    source.go.set()
    feed.close()
    caplog.clear()
    feed.close()
    assert not caplog.records


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_read_that_fails_once_loses_nothing(prefetch):
    source = Rows(gate=19, fault=OSError("the network blinked"))
    source.go.set()
    with Feed(source, 8, SHARDING, order=IN_ORDER, epochs=1, prefetch=prefetch) as feed:
        assert firsts(feed, 2) == [0, 8]
        with pytest.raises(RowError, match="the network blinked"):
            next(feed)
        assert feed.get_state()["step"] == 2
        assert [int(batch[0]) for batch in feed] == [16, 24, 32, 40, 48, 56]


def test_an_interrupt_after_a_batch_was_taken_out_loses_nothing(monkeypatch):
    taken = []

    def take_and_be_interrupted(run):
        taken.append(take(run))
        if len(taken) == 3:
            raise KeyboardInterrupt
        return taken[-1]

    take = Prefetcher.take
    monkeypatch.setattr(Prefetcher, "take", take_and_be_interrupted)
    with Feed(np.arange(64), 8, SHARDING, order=IN_ORDER, epochs=1) as feed:
        assert firsts(feed, 2) == [0, 8]
        with pytest.raises(KeyboardInterrupt):
            next(feed)
        assert feed.get_state()["step"] == feed.statistics().batches == 2
        assert [int(batch[0]) for batch in feed] == [16, 24, 32, 40, 48, 56]


def test_a_stall_is_said_with_stacks_then_raised_and_the_feed_goes_on_after_it(caplog):
    source = Rows(gate=8)
    reading = Reading(stall_warning_s=0.05, stall_error_s=0.1)
    with Feed(source, 8, SHARDING, order=IN_ORDER, epochs=1, reading=reading) as feed:
        assert firsts(feed, 1) == [0]
        with (
            caplog.at_level(logging.WARNING, logger="feedline"),
            pytest.raises(StallError, match=r"Reading.stall_error_s = 0\.1 s: .* the last was \"read\""),
        ):
            next(feed)
        assert "in read" in caplog.text  # the stack of the thread that is stuck
        source.go.set()
        assert [int(batch[0]) for batch in feed] == [8, 16, 24, 32, 40, 48, 56]


def test_a_feed_that_is_dropped_ends_its_threads():
    before = threading.enumerate()
    feed = Feed(np.arange(64), 8, SHARDING)
    next(feed)
    assert len(threading.enumerate()) > len(before)
    del feed
    gc.collect()
    assert not left_behind(before)


def test_an_exhausted_feed_has_no_thread():
    before = threading.enumerate()
    feed = Feed(np.arange(64), 8, SHARDING, epochs=1)
    assert sum(1 for _ in feed) == 8
    assert not left_behind(before)
    feed.close()
