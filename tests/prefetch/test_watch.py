"""The watchdog, on a clock that the test moves: what counts as waiting, and when it warns and raises."""

import contextlib
import gc
import itertools
import logging
import sys
import threading
import time
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest
from background import PATIENCE_S, arrived, spawn
from hypothesis import given, settings
from hypothesis import strategies as st
from row_sources import Numbered

from feedline import Feed, Reading, StallError
from feedline._src.prefetch import watch as module
from feedline._src.prefetch.pipelines import Empty, Prefetcher
from feedline._src.prefetch.watch import Watch, alarmed


class Clock:
    """Replaces the module `time`."""

    def __init__(self):
        self.now = 0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(module, "time", clock := Clock())
    return clock


@pytest.fixture
def watch(clock):
    return Watch(Reading(stall_warning_s=30, stall_error_s=300))


def test_one_warning_with_stage_and_stacks_comes_before_the_error(watch, clock, caplog):
    watch.waits()
    watch.advanced("read")
    clock.now += 30
    watch.warn_or_raise(waiting=2)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("feedline", logging.WARNING)
    message = record.getMessage()
    assert message.startswith(
        'no stage has advanced for 30 s while the training loop waits; the last stage was "read", '
        "and 2 later batches are ready. Stacks of all threads:\n-- "
    )
    assert "-- MainThread\n" in message
    assert "test_one_warning_with_stage_and_stacks_comes_before_the_error" in message
    assert watch.patience_s() == 270
    clock.now += 269
    watch.warn_or_raise(0)
    clock.now += 1
    with pytest.raises(
        StallError,
        match=r"must come within Reading.stall_error_s = 300 s: no stage has advanced for 300 s .*"
        r'the last stage was "read", and 0 later batches are ready. '
        r"Look at the stacks .*raise that limit \[stage read\]",
    ) as caught:
        watch.warn_or_raise(0)
    assert caught.value.stage == "read"
    assert len(caplog.records) == 1


def test_time_in_which_the_process_was_stopped_does_not_count(clock, caplog):
    watch = Watch(Reading(stall_warning_s=30, stall_error_s=300))
    watch.waits()
    assert watch.patience_s() == 30
    clock.now += 1000
    watch.warn_or_raise(0)
    assert not caplog.records
    assert watch.patience_s() == 30
    clock.now += 30
    watch.warn_or_raise(0)
    assert "no stage has advanced for 30 s" in caplog.text


def expected_complaints(progress, comes_at, warning_s, error_s):
    """Second by second: the warnings and errors for a consumer that waits from second 0 until `comes_at`."""
    heard, still = [], 0
    for second in range(1, comes_at):
        still = 0 if second in progress else still + 1
        if still in (warning_s, error_s) and not heard:
            heard.append(("warning", second))
        if still == error_s:
            return [*heard, ("error", second)]
    return heard


@given(
    progress=st.sets(st.integers(1, 40)),
    comes_at=st.integers(1, 40),
    warning_s=st.integers(1, 12),
    error_s=st.integers(1, 20),
)
@settings(max_examples=300, deadline=None)
def test_a_prefetcher_warns_and_raises_at_the_seconds_of_an_oracle(progress, comes_at, warning_s, error_s):
    clock, heard = Clock(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        patch.setattr(module._log, "warning", lambda *_: heard.append(("warning", clock.now)))
        watch = Watch(Reading(stall_warning_s=warning_s, stall_error_s=error_s))
        clock.now = 0.0

        def take(timeout_s):
            """Like `Handover.take`, while stages advance at the given seconds."""
            until = min(clock.now + timeout_s, comes_at)
            for second in sorted(progress):
                if clock.now < second <= until:
                    clock.now = second
                    watch.advanced("read")
            clock.now = until
            if until < comes_at:
                raise Empty
            return "item"

        prefetcher = Prefetcher.of_iterator(iter([]), None, 1, watch)
        patch.setattr(prefetcher, "_handover", SimpleNamespace(take=take, waiting=0))
        try:
            assert prefetcher.take() == "item"
        except StallError:
            heard.append(("error", clock.now))
    assert heard == expected_complaints(progress, comes_at, warning_s, error_s)


@pytest.fixture
def warned():
    """An event that the first warning sets; its attribute `text` lists the texts of all warnings."""
    event = threading.Event()
    event.text = []

    class Handler(logging.Handler):
        def emit(self, record):
            event.text.append(record.getMessage())
            event.set()

    handler = Handler(logging.WARNING)
    module._log.addHandler(handler)
    yield event
    module._log.removeHandler(handler)


@pytest.mark.parametrize("raises", [False, True])
def test_an_alarm_whose_block_ends_in_time_logs_nothing_and_leaves_no_thread(warned, raises):
    before = {*sys._current_frames()}
    ends = pytest.raises(KeyError) if raises else contextlib.nullcontext()
    with ends, alarmed(PATIENCE_S, pytest.fail):
        if raises:
            raise KeyError
    assert alive_except(before) == set()
    assert warned.text == []


def alive_except(before):
    """The ids of new threads that do not end. `threading` does not know the thread of an alarm."""
    deadline = time.monotonic() + PATIENCE_S
    while (new := {*sys._current_frames()} - before) and time.monotonic() < deadline:
        time.sleep(0.001)
    return new


def test_an_interrupt_anywhere_in_an_alarm_leaves_neither_a_lock_nor_a_thread(warned):
    """The interrupt comes at each line and return of an alarm's end, also in the standard library."""

    def interrupted(at):
        def trace(frame, event, argument):
            nonlocal at
            if frame.f_code.co_filename not in (module.__file__, contextlib.__file__, threading.__file__):
                return None  # such as in a callback of the garbage collector, where Python ignores an interrupt
            at -= event in ("line", "return")
            if at == 0:
                raise KeyboardInterrupt
            return trace

        gc.disable()  # a collection could finalize what other tests left, and take the alarm's interrupt
        try:
            with alarmed(PATIENCE_S, pytest.fail):
                sys.settrace(trace)
        except KeyboardInterrupt:
            pass
        sys.settrace(None)
        gc.enable()
        return at <= 0

    before = {*sys._current_frames()}
    for at in itertools.count(1):
        if not spawn(lambda at=at: interrupted(at)).result(PATIENCE_S):
            break
    assert at > 5
    assert alive_except(before) == set()
    assert warned.text == []


SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])
READING = Reading(stall_warning_s=0.02)


def test_a_hang_without_prefetch_is_warned_of(warned):
    class Hanging(Numbered):
        def read(self, rows, out):
            arrived(warned)
            super().read(rows, out)

    before = {*sys._current_frames()}
    with Feed(Hanging(8, x=np.int32(0)), 8, SHARDING, prefetch=0, reading=READING) as feed:
        assert alive_except(before) == set()  # the alarm of the build has ended; it may have warned
        warned.clear()
        warned.text.clear()
        assert sorted(np.asarray(next(feed)["x"])) == [*range(8)]
    (message,) = warned.text
    assert 'while `next` makes a batch itself; the last stage was "read". Stacks' in message
    assert "in take\n" in message


def test_a_hang_while_a_feed_is_built_is_warned_of(warned):
    def read(index):
        arrived(warned)
        return {"x": np.int32(index)}

    Feed(grain.MapDataset.range(8).map(read), 8, SHARDING, reading=READING).close()
    (message,) = warned.text
    assert message.startswith("building a feed has taken 0.02 s so far: it opens the source, reads its first row")
    assert "in build\n" in message
