"""The accounts of a feed: times from records that were written by hand, and from real feeds."""

import collections
import gc
import logging
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import LOOP_S, ROWS, trained

import feedline
from feedline._src.listen import listening
from feedline._src.listen.accounting import Accounting, Waits
from feedline._src.listen.devices import TransferWatch
from feedline._src.listen.window import Window
from feedline._src.record import BatchRecord, PartTimes, PlaceTimes

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def delivered(accounting, asked, taken, part=(0.0, 0.0, 0.0), placing=(0.0, 0.0), ready_s=None):
    """A batch that was read, transformed and staged in three times, and placed from a time on for so long."""
    began = placing[0] - sum(part) - 0.5  # half a second in host memory
    parts, placed = [PartTimes("read", began, *part, 0.01, 0.02)], PlaceTimes("place", *placing, 0.001)
    accounting.told(BatchRecord(asked, taken, parts, placed))
    if ready_s is not None:
        accounting.transferred(placing[0], ready_s)
    return accounting.placed()


def test_the_times_of_a_batch():
    accounting = Accounting(ahead=1)
    delivered(accounting, 10.0, 11.0, part=(0.1, 0.2, 0.3), placing=(10.5, 0.4))
    delivered(accounting, 14.0, 14.5, part=(0.1, 0.0, 0.0), placing=(14.1, 0.2))
    first, second = accounting.latest()
    assert (first.read_s, first.transform_s, first.stage_s, first.place_s) == (0.1, 0.2, 0.3, 0.4)
    assert (first.read_cpu_s, first.host_cpu_s, first.place_cpu_s) == (0.01, 0.02, 0.001)
    assert first.cpu_s == pytest.approx(0.031)
    assert first.slot_s == pytest.approx(0.5)
    assert first.queued_s == pytest.approx(11.0 - 10.9)
    assert first.put == pytest.approx(10.9)
    assert (first.wait_s, first.loop_s, first.drained) == (1.0, None, False)
    assert (second.wait_s, second.loop_s, second.drained) == (0.5, 3.0, False)
    assert first.empty_s == pytest.approx(0.9)  # from 10.0, when it was asked for
    assert second.empty_s == pytest.approx(3.3)  # from 11.0, when the one before was taken
    sums, _ = accounting.sums()
    assert (sums.read_s, sums.loop_s, sums.wait_s) == (pytest.approx(0.2), 3.0, 1.5)


def test_the_time_of_a_break_is_not_the_loops_own():
    accounting = Accounting(ahead=1)
    for asked in (1.0, 2.0, 3.0, 4.0):
        delivered(accounting, asked, asked)
    accounting.interrupted()
    for asked in (100.0, 101.0, 102.0):
        delivered(accounting, asked, asked + 0.5)
    assert [batch.loop_s for batch in accounting.latest()] == [None, 1.0, 1.0, 1.0, None, 0.5, 0.5]
    # read ahead: one, while the step after the first compiled
    assert [batch.drained for batch in accounting.latest()] == [False] * 3 + [True] * 4
    assert accounting.sums()[0].loop_s == 4.0
    window = Window.of(accounting.latest())
    assert (window.loop_s, window.wait_s, window.last) == (2 / 4, 1.5 / 4, 2)  # the first wait of the pass counts


def test_glances_count_in_the_loops_own_time_alone():
    accounting, expected = Accounting(ahead=-2), []
    for step in range(1, 21):
        at = step + 0.25 if step % 2 else step + 0.75  # in `next`, until 0.5; or in the loop's own time
        accounting.glanced(at, step % 6 == 0)
        expected += [] if step % 2 else [step % 6 == 0]
        delivered(accounting, step, step + 0.5)
        if step == 17:
            assert accounting.idle_share() == pytest.approx(2 / 8)
        elif step < 17:
            assert accounting.idle_share() is None  # too few
    assert accounting.idle_share() == pytest.approx(sum(expected[:9]) / 9)  # the loop may be within the last one


def test_glances_while_the_buffers_fill_or_the_loop_is_elsewhere_do_not_count():
    accounting = Accounting(ahead=1)
    for step in range(1, 30):
        accounting.glanced(step - 0.1, step in (2, 3, 20))  # while the step compiles, and in a break
        if step == 20:
            accounting.interrupted()
        delivered(accounting, step, step + 0.5)
    assert accounting.idle_share() == 0.0


def test_a_rare_pause_of_the_loop_is_left_out_and_a_wait_for_each_tenth_step_is_not():
    for count, pauses in ((100, {50: 4.0}), (100, {10 * i: 0.5 for i in range(1, 10)})):
        accounting, now = Accounting(ahead=0), 0.0
        for i in range(count):
            now += 0.002 + pauses.get(i, 0.0)
            delivered(accounting, now, now + 0.003)
            now += 0.003
        window = Window.of(accounting.latest())
        expected = 0.002 if len(pauses) == 1 else 0.002 + 0.5 * 9 / 98
        assert window.loop_s == pytest.approx(expected)
        assert window.wait_s == pytest.approx(0.003)


def test_a_transfer_that_ends_after_the_batch_was_taken_is_late():
    accounting = Accounting(ahead=-1)
    delivered(accounting, 1.0, 1.0, placing=(0.5, 0.1), ready_s=0.1)
    delivered(accounting, 2.0, 2.0, placing=(1.5, 0.1))
    delivered(accounting, 3.0, 3.0, placing=(2.5, 0.1))
    accounting.transferred(1.5, 1.25)  # ready at 2.75, and taken at 2.0
    assert [batch.late_s for batch in accounting.latest()] == [0.0, 0.75, None]
    assert accounting.transfer_s() == pytest.approx((0.1 + 1.25) / 2)
    window = Window.of(accounting.latest())
    assert window.late_s == 0.75  # the first batch has no time before it
    assert window.au == pytest.approx(0.25) == 1 - window.wait_share


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentiles_of_waits(waits, share):
    histogram = Waits()
    for wait in waits:
        histogram.add(wait)
    exact = np.percentile(waits, 100 * share, method="inverted_cdf")
    assert histogram.percentile_s(share) == pytest.approx(exact, rel=0.0225, abs=2e-7)
    assert histogram.max_s == pytest.approx(max(waits), abs=2e-7)


def test_several_threads_may_ask_while_the_loop_goes_on():
    accounting, asking = Accounting(ahead=0), True

    def ask():
        while asking:
            accounting.sums()
            accounting.latest()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(300):
        delivered(accounting, i + 0.0, i + 0.25, part=(1.0, 0, 0))
    asking = False
    for thread in threads:
        thread.join()
    sums, (median_s, _, longest_s) = accounting.sums()
    assert (sums.read_s, sums.wait_s, sums.loop_s) == (300, 75, 0.75 * 299)
    assert (longest_s, len(accounting.latest())) == (0.25, 256)
    assert median_s == pytest.approx(0.25, rel=0.0225)


def test_an_interrupt_while_records_are_added_up_stops_nothing(monkeypatch):
    """The claim of the interrupted thread stays: its own next call takes it over, others do after a while."""
    accounting = Accounting(ahead=0)
    other = threading.get_ident() + 1
    accounting._claim["claim"] = other, time.monotonic() + 1000  # so that it is not old on a slow machine
    for i in range(10_000):
        assert not delivered(accounting, i, i)
    assert len(accounting._records) < 5000
    accounting._claim["claim"] = other, time.monotonic()
    monkeypatch.setattr("feedline._src.listen.accounting._CLAIM_TIMEOUT_S", 0.0)
    assert delivered(accounting, 10_000, 10_000)
    accounting._claim["claim"] = threading.get_ident(), time.monotonic()
    assert accounting.sums()[0].loop_s > 0


@pytest.mark.slow
def test_the_times_of_workers_come_with_their_batches(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((64, 4), np.float32))
    reading = feedline.Reading(workers=1)
    with feedline.Feed(tmp_path / "x.npy", 16, ONE, reading=reading, transform=_slowly, epochs=1) as feed:
        assert len(list(feed)) == 4
        told = feed.statistics()
    assert told.transform_s >= 4 * 0.02
    assert told.read_s > 0 < told.stage_s
    assert told.host_cpu_s < told.transform_s


def _slowly(batch, rows):
    time.sleep(0.02)
    return batch


@pytest.mark.slow
def test_statistics_of_a_real_feed_count_what_its_stages_slept():
    seen = []
    stages = {"read": 2 * LOOP_S, "host": 2 * LOOP_S, "place": LOOP_S}
    trained(**stages, jitter=0.0, steps=20, watch=lambda feed: seen.append(feed.statistics()))
    first, last = seen[0], seen[-1]
    steps = last.batches - first.batches
    assert last.read_s - first.read_s >= steps * 2 * LOOP_S
    assert last.transform_s - first.transform_s >= steps * 2 * LOOP_S
    assert last.place_s - first.place_s >= steps * LOOP_S
    assert last.loop_s - first.loop_s >= steps * LOOP_S
    assert 0 < last.wait_p50_s <= last.wait_p99_s <= last.wait_max_s
    assert last.placed_bytes == last.batches * ROWS * 4 * 4
    assert last.host_bytes >= 3 * ROWS * 4 * 4


def test_the_times_of_a_stream():
    import grain

    def slow(row):
        time.sleep(0.002)
        return row

    rows = [{"x": np.zeros(3, np.float32)}] * 64
    stream = grain.MapDataset.source(rows).map(slow).to_iter_dataset(grain.ReadOptions(0, 0))
    with feedline.Feed(stream, 16, ONE, epochs=1, transform=_slowly) as feed:
        assert len(list(feed)) == 4
        told = feed.statistics()
        report = feed.report()
    assert told.read_s >= 64 * 0.002
    assert told.transform_s >= 4 * 0.02
    assert report.bound in ("read", "host")
    assert "one thread reads a stream" in report.advice or report.change is not None


# --- transfers ---


def test_transfers_are_watched_two_at_a_time_and_no_batch_is_kept(monkeypatch):
    reports = collections.deque()
    gate = threading.Event()
    waited = jax.block_until_ready

    def block(arrays):
        gate.wait()
        return waited(arrays)

    monkeypatch.setattr(jax, "block_until_ready", block)
    watch = TransferWatch(lambda began, ready_s: reports.append(began))
    for began in range(10):
        watch([jnp.zeros(2)], float(began))
    gate.set()
    deadline = time.monotonic() + 30
    while (watch._transfers.watched.qsize() or len(reports) < 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reports[0] == 0.0
    assert 2 <= len(reports) <= 4
    thread = watch._transfers._thread
    del watch
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_donated_batch_is_left_alone():
    reports = []
    watch = TransferWatch(lambda *times: reports.append(times))
    gone = jnp.zeros(2)
    gone.delete()
    watch([gone], 0.0)
    watch([jnp.zeros(2)], 1.0)
    deadline = time.monotonic() + 10
    while not reports and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [began for began, _ in reports] == [1.0]


# --- the warning ---


def test_a_feed_that_is_waited_for_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(listening, "_WARN_AFTER_S", 0.3)
    with caplog.at_level(logging.WARNING, "feedline"):
        trained(read=4 * LOOP_S, steps=120)
    (record,) = caplog.records
    assert "reading limits training: the loop waits for input" in record.message
    assert "; advice: " in record.message


def test_a_fault_in_what_observes_does_not_end_training(monkeypatch, caplog):
    monkeypatch.setattr(listening, "_WARN_AFTER_S", 0.1)
    monkeypatch.setattr("feedline._src.listen.verdict.judge", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the report at the end, which the caller asked for
        trained(read=4 * LOOP_S, steps=80)
    assert "could not judge" in caplog.text


def test_a_report_before_the_second_batch_is_an_error():
    with feedline.Feed({"x": np.zeros(64)}, 8, ONE) as feed:
        for count in range(2):
            with pytest.raises(ValueError, match=f"needs two batches .* delivered {count}; call it after some"):
                feed.report()
            next(feed)
        assert feed.report().batches == 1
