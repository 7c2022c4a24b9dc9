"""Each bottleneck, planted in a real feed, alone and in pairs: the report names it, and the loop's waits."""

import itertools
import os
import time

import jax
import numpy as np
import pytest
from planted import LOOP_S, ROWS, trained
from timed import timed

import feedline

pytestmark = pytest.mark.slow

THREADS = 2
FACTORS = (1.2, 2, 5)
"""How many times as slow as the loop a stage is."""


def seconds(factor):
    """Of threads: two share the work."""
    return factor * LOOP_S * THREADS


def steps(factor):
    return 240 if factor < 2 else 60


def assert_true(report, loop_share):
    assert report.wait_share == pytest.approx(1 - loop_share, abs=0.03)  # 0.02 on a quiet machine
    assert report.drained


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("stage", ["read", "host", "place"])
@timed
def test_one_stage_binds(stage, factor):
    report, au = trained(**{stage: seconds(factor)}, steps=steps(factor))
    assert_true(report, au)
    assert 1 - report.wait_share == pytest.approx(1 / factor, rel=0.15)  # as planted, and the work around a sleep
    assert report.bound == stage
    assert report.headroom[stage] == pytest.approx(1 / factor, rel=0.15)
    assert all(report.headroom[other] > 2 for other in {"read", "host", "place"} - {stage})


@pytest.mark.parametrize("factor", [0, 1 / 5, 1 / 2, 1 / 1.3])
@timed
def test_a_loop_that_sleeps_binds(factor):
    report, au = trained(read=seconds(factor), steps=160)
    assert_true(report, au)
    assert report.bound == "loop"
    assert report.change is None


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(["read", "host", "place"], 2)))
@timed
def test_of_two_slow_stages_the_slower_binds(first, second):
    report, au = trained(**{first: seconds(2), second: seconds(1.2)}, steps=60)
    assert_true(report, au)
    assert report.bound == first


@pytest.mark.parametrize(("stage", "factor"), [("read", 1.2), ("read", 2), ("host", 2), ("read", 5)])
@timed
def test_the_predicted_gain_comes(stage, factor):
    report, _ = trained(**{stage: seconds(factor)}, steps=steps(factor))
    change = report.change
    assert (change.setting, change.now) == ("Reading.threads", THREADS)
    assert change.then == pytest.approx(THREADS * factor, abs=1.6)
    buffer = change.buffer[1] if change.buffer else 2
    after, au = trained(**{stage: seconds(factor)}, steps=120, threads=change.then, buffer=buffer)
    assert_true(after, au)
    assert after.wait_share == pytest.approx(change.wait_share, abs=0.06)


@timed
def test_without_prefetch_the_loop_waits_for_every_stage():
    report, au = trained(read=LOOP_S, host=LOOP_S / 2, prefetch=0, threads=None, steps=40)
    assert_true(report, au)
    assert report.bound == "read"
    assert (report.change.setting, report.change.now, report.change.then) == ("prefetch", 0, 2)
    after, _ = trained(read=LOOP_S, host=LOOP_S / 2, prefetch=2, threads=None, steps=80)
    assert after.wait_share == pytest.approx(report.change.wait_share, abs=0.06)


@timed
def test_uneven_reads_need_a_larger_buffer():
    """On average reading is fast enough, but each tenth batch takes as long as eight steps."""
    uneven = {"read": 8 * LOOP_S, "read_every": 10, "jitter": 0.0, "steps": 150}
    report, au = trained(**uneven)
    assert_true(report, au)
    assert report.bound == "read"
    assert report.change.setting in ("Reading.buffer", "prefetch")
    name = report.change.setting.removeprefix("Reading.")
    after, _ = trained(**uneven, **{name: report.change.then})
    assert after.wait_share == pytest.approx(report.change.wait_share, abs=0.06)


@timed
def test_a_full_queue_does_not_hide_a_slow_producer():
    """While a long queue drains, the loop does not wait: the report already says what comes."""
    waits = []

    def watch(feed):
        while not waits and feed.statistics().ready < 64:  # the first step compiles, as it were
            time.sleep(0.01)
        waits.append(feed.statistics().wait_s if len(waits) in (0, 59) else None)

    report, au = trained(read=seconds(1.3), prefetch=64, jitter=0.0, steps=60, watch=watch)
    assert waits[-1] - waits[0] < 0.1 * LOOP_S * 59
    assert au > 0.9
    assert report.bound == "read"
    assert 1 - report.wait_share == pytest.approx(1 / 1.3, rel=0.15)
    assert not report.drained


def in_python(batch, rows):
    """Holds the interpreter's lock for some 60 ms a batch, however many threads share it."""
    began, part_s = time.thread_time(), 0.060 * len(rows.index) / ROWS
    while time.thread_time() - began < part_s:
        pass
    return batch


def fed(path, **reading):
    """The report on a loop that sleeps 6 ms a step."""
    device = jax.devices()[0]
    with feedline.Feed(path, ROWS, device, transform=in_python, reading=feedline.Reading(**reading)) as feed:
        for _ in range(60):
            next(feed)
            time.sleep(LOOP_S)
        return feed.report()


@timed
def test_python_that_holds_the_lock_needs_workers(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((10_000, 4), np.float32))
    report = fed(tmp_path / "x.npy", threads=2)
    assert report.bound == "host"
    assert report.wait_share > 0.1  # not 0.9: the loop, too, waits for the lock, outside of `next`
    if len(os.sched_getaffinity(0)) > 1:
        assert report.change.setting == "Reading.workers"
        after = fed(tmp_path / "x.npy", workers=2)
        assert after.step_s < report.step_s
