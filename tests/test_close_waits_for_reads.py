"""A source is closed only when no thread reads it, and an error does not wait for other reads."""

import logging
import threading

import numpy as np
import pytest
from background import PATIENCE_S, arrived, spawn

from feedline import Feed, Order, Reading, RowError
from feedline._src.sources.arrays import ArraySource

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


class Gated:
    """Changes `ArraySource`: reads of row 8 wait for a gate, and reads of row 0 fail once row 8 is being read."""

    def __init__(self, monkeypatch):
        self.inside, self.gate, self.closed = threading.Event(), threading.Event(), []
        usual = ArraySource.read_ordered

        def read(source, order, epoch, positions, cuts):
            if 8 in positions:
                self.inside.set()
                arrived(self.gate)
            elif 0 in positions:
                arrived(self.inside)
                raise RowError("unreadable", row=0)
            return usual(source, order, epoch, positions, cuts)

        monkeypatch.setattr(ArraySource, "read_ordered", read)
        monkeypatch.setattr(ArraySource, "close", lambda source: self.closed.append(self.gate.is_set()))


@pytest.fixture
def gated(monkeypatch):
    return Gated(monkeypatch)


@pytest.fixture
def feed(sharding, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(64))
    reading = Reading(threads=2, buffer=2)
    return Feed(tmp_path / "x.npy", 8, sharding, order=Order(shuffle=False), epochs=1, reading=reading)


def test_an_error_comes_at_once_and_the_source_is_closed_after_the_read_ahead(gated, feed, caplog):
    with pytest.raises(RowError, match="unreadable"):
        next(feed)  # while the other thread is reading row 8
    feed.close(timeout_s=0.01)
    assert gated.closed == []
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith("feedline-read-")
    assert message.endswith("is still busy with a read or a transfer 0.01 s after close, so the source stays open")
    closing = spawn(feed.close)
    gated.gate.set()
    closing.result(PATIENCE_S)
    feed.close()
    assert gated.closed == [True]


def test_without_prefetch_another_threads_close_waits_for_the_read(gated, sharding, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(64))
    feed = Feed(tmp_path / "x.npy", 8, sharding, order=Order(shuffle=False), epochs=1, prefetch=0)
    feed.seek(0, 8)
    taking = spawn(lambda: next(feed))
    arrived(gated.inside)
    feed.close(timeout_s=0.01)
    assert gated.closed == []
    closing = [spawn(feed.close) for _ in range(2)]
    assert not any(each.done() for each in closing)
    gated.gate.set()
    taking.result(PATIENCE_S)
    for each in closing:
        each.result(PATIENCE_S)
    assert gated.closed == [True]


def test_a_pipeline_given_up_during_a_read_is_let_go_of_once_the_read_has_ended(gated, feed, monkeypatch):
    feed.seek(0, 8)
    taking = spawn(lambda: next(feed))
    arrived(gated.inside)
    (held,) = feed._runs.alive
    feed._stop(0, reads=False)  # as an interrupt does
    with pytest.raises(Exception, match="closed"):
        taking.result(PATIENCE_S)
    feed.seek(0, 16)
    next(feed)
    assert held in feed._runs.alive
    gated.gate.set()
    assert held.join(PATIENCE_S) is None
    with monkeypatch.context() as interrupted:
        interrupted.setattr(held, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(feed)
    assert np.asarray(next(feed)).tolist() == list(range(24, 32))  # the interrupt lost no batch
    assert held not in feed._runs.alive
    feed.close()


def interrupt(*_, **__):
    raise KeyboardInterrupt
