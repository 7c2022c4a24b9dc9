"""Calls of a feed in signal handlers, transforms, other threads and at exit, and exceptions in the loop."""

import contextlib
import logging
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest
from background import PATIENCE_S, arrived, left_behind

from feedline import Feed, Order, Reading

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ROWS = [list(range(start, start + 8)) for start in range(0, 64, 8)]
CLOSED = "the feed is closed; to continue, build a new feed and call its set_state with this feed's get_state()"


@pytest.fixture(autouse=True)
def nothing_is_left(caplog):
    before = threading.enumerate()
    yield
    assert left_behind(before) == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def feed_of(source, **options):
    return Feed(source, 8, ONE, order=Order(shuffle=False), **{"epochs": 1, **options})


def called_at(line, call, function):
    """Call `function`. At the `line`-th line that it runs in feedline, `call` interrupts it like a signal handler.

    Returns whether `function` ran that many lines, and what it returned or raised.
    """
    seen, called = 0, False

    def trace(frame, event, _):
        nonlocal seen, called
        if called or "/feedline/" not in frame.f_code.co_filename:
            return None
        seen += event == "line"
        if seen == line:
            called = True
            call()  # Python does not trace this call
        return trace

    sys.settrace(trace)
    try:
        found = function()
    except Exception as error:  # noqa: BLE001
        found = error
    finally:
        sys.settrace(None)
    return called, found


@pytest.mark.slow
@pytest.mark.parametrize(("prefetch", "batch"), [(0, 1), (2, 0), (2, 1)])
def test_close_at_any_line_of_next_ends_the_feed(tmp_path, prefetch, batch):
    """A signal handler, or a finalizer that the garbage collector runs, may call `close` at any line."""
    np.save(tmp_path / "x.npy", np.arange(64))
    for line in range(1, 2000):
        feed = feed_of(tmp_path / "x.npy", prefetch=prefetch, reading=Reading(threads=1))
        for _ in range(batch):
            next(feed)
        called, found = called_at(line, feed.close, lambda feed=feed: next(feed))
        if isinstance(found, Exception):
            assert (type(found), str(found)) == (ValueError, CLOSED)
        else:
            assert found.tolist() == ROWS[batch]
        assert feed.get_state()["step"] == batch + (not isinstance(found, Exception))
        if called:
            with pytest.raises(ValueError, match="the feed is closed"):
                next(feed)
        feed.close()
        if not called:
            break
    assert 10 < line < 1999


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_state_taken_at_any_line_of_next_resumes_there(prefetch):
    """A signal handler that saves a checkpoint takes the state at any line."""
    with feed_of(np.arange(64), prefetch=prefetch, reading=Reading(threads=1)) as feed:
        for line in range(1, 2000):
            states = []
            feed.seek(0, 8)
            step = feed.get_state()["step"]
            called, batch = called_at(
                line, lambda states=states: states.append(feed.get_state()), lambda: next(feed)
            )
            assert batch.tolist() == ROWS[1]
            if not called:
                break
            (state,) = states
            assert (state["step"] - step, state["position"]) in [(0, 8), (1, 16)]
    assert 10 < line < 1999


@pytest.mark.parametrize(
    ("prefetch", "told"), [(0, "the next batch is being made on this thread"), (2, "another thread is inside it")]
)
def test_a_transform_that_asks_for_the_next_batch_gets_an_error_and_may_close_the_feed(prefetch, told):
    def transform(batch, rows):
        call and call[0]()
        return batch

    call = []
    feed = feed_of(np.arange(64), prefetch=prefetch, transform=transform)
    assert next(feed).tolist() == ROWS[0]
    feed.seek(0, 8)  # drops what was read ahead, so that `transform` runs again
    call.append(lambda: next(feed))
    with pytest.raises(ValueError, match=told):
        next(feed)
    call.clear()
    assert next(feed).tolist() == ROWS[1]
    feed.seek(0, 16)
    call.append(feed.close)
    with contextlib.suppress(ValueError):  # or the batch comes before the feed is closed
        next(feed)
    with pytest.raises(ValueError, match="the feed is closed"):
        next(feed)
    feed.close()


def test_reading_threads_of_two_pipelines_that_both_close_the_feed_do_not_wait_for_each_other():
    def transform(batch, rows):
        if len(rows.index) > 1:
            inside.release()
            arrived(both_inside)
            feed.close(timeout_s=1000)
            closed.release()
        return batch

    inside, both_inside, closed = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
    feed = feed_of(np.arange(64), prefetch=2, transform=transform, reading=Reading(threads=1))
    for position in (8, 16):  # the second pipeline begins while a thread of the first one is inside a read
        feed.seek(0, position)
        feed.start()
        assert inside.acquire(timeout=PATIENCE_S)
    both_inside.set()
    assert all(closed.acquire(timeout=PATIENCE_S) for _ in range(2))
    feed.close()


WITH_WORKERS = """
import atexit, os, signal, sys, threading, time
import jax, numpy as np
import feedline
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
def slowly(batch, rows):
    time.sleep(0.2)
    return batch
def feed_of(workers, **options):
    return feedline.Feed("x.npy", 8, one, reading=feedline.Reading(workers=workers), **options)
def ended(feed, name):
    began = time.monotonic()
    try:
        for batch in feed:
            pass
    except ValueError as error:
        print(name, time.monotonic() - began, error, flush=True)
def main():
    with feed_of(1, transform=slowly, prefetch=0) as feed:
        next(feed)
        signal.signal(signal.SIGUSR1, lambda number, frame: feed.close())
        threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
        ended(feed, "handler")
    feed = feed_of(1, transform=slowly, prefetch=0)
    next(feed)
    threading.Timer(0.5, feed.close).start()
    ended(feed, "thread")
    feed = feed_of(2)
    atexit.register(feed.close)
    for batch in feed:
        print("raises", time.time(), flush=True)
        raise KeyError("mine")
if __name__ == "__main__":
    np.save("x.npy", np.arange(8000))
    main()
"""


@pytest.mark.slow
def test_with_workers_close_in_a_handler_in_a_thread_and_at_exit_after_an_exception(start, measured):
    ended = start(WITH_WORKERS).end()
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.splitlines()[-1] == "KeyError: 'mine'"
    assert ended.left == []
    told = {line.split()[0]: line.split(maxsplit=2)[1:] for line in ended.stdout.splitlines()}
    assert told["handler"][1] == told["thread"][1] == CLOSED
    measured("`close()` in a signal handler while `next` waits", float(told["handler"][0]) - 0.5)
    measured("`close()` from another thread while `next` waits", float(told["thread"][0]) - 0.5)
    measured("an exception in the loop while the feed is open", time.time() - float(told["raises"][0]))


IN_A_THREAD = """
import sys, threading
import jax, numpy as np
import feedline
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
feed = feedline.Feed(np.arange(8000), 8, one)
began = threading.Event()
def loop():
    for batch in feed:
        began.set()
threading.Thread(target=loop, daemon="daemon" in sys.argv).start()
began.wait()
"""


@pytest.mark.slow
def test_the_main_thread_ends_while_another_one_takes_batches(start):
    ended = start(IN_A_THREAD).end()
    assert (ended.returncode, ended.left) == (0, [])
    assert ended.stderr.count("Traceback") == 1
    told = (
        "ValueError: feeds are closed when the interpreter exits, and the exit begins once the main thread has "
        "ended; join the threads that use a feed before that"
    )
    assert ended.stderr.splitlines()[-1] == told
    ended = start(IN_A_THREAD, "daemon").end()
    assert ended.left == []
    # Python ends a daemon thread wherever it is, perhaps while it writes or deletes an array
    assert ended.returncode in (0, -signal.SIGABRT)
