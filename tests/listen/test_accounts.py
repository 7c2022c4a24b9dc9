"""`Accounts`: the sums over hand-written records and over real feeds, and the batches that a verdict counts."""

import logging
import time
import weakref

import jax
import numpy as np
import pytest
from background import PATIENCE_S, spawn
from planted import LOOP_S, ROWS, trained

import feedline
from feedline._src.listen import listening
from feedline._src.listen.accounts import Accounts
from feedline._src.listen.devices import Glance
from feedline._src.record import BatchRecord, PartTimes, PlaceTimes

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def delivered(accounts, asked, taken, part=(0.0, 0.0, 0.0), placing=(0.0, 0.0), ready_s=None):
    """Record a batch. `part`: seconds to read, transform and stage; `placing`: when placing began, seconds."""
    began = placing[0] - sum(part) - 0.5  # then the batch waits half a second in host memory
    parts, placed = [PartTimes("read", began, *part, 0.01, 0.02)], PlaceTimes("place", *placing, 0.001)
    accounts.delivered(BatchRecord(asked, taken, parts, placed))
    if ready_s is not None:
        accounts._transfers.append((placing[0], ready_s))
    if len(accounts._records) >= 16:
        accounts.sums()


def latest(accounts):
    accounts.sums()
    return list(accounts._latest)


def test_the_times_of_a_batch():
    accounts = Accounts(ahead=-2)
    delivered(accounts, 10.0, 11.0, part=(0.1, 0.2, 0.3), placing=(10.5, 0.4))
    delivered(accounts, 14.0, 14.5, part=(0.1, 0.0, 0.0), placing=(14.1, 0.2))
    first, second = latest(accounts)
    assert (first.read_s, first.transform_s, first.stage_s, first.place_s) == (0.1, 0.2, 0.3, 0.4)
    assert (first.read_cpu_s, first.host_cpu_s, first.place_cpu_s) == (0.01, 0.02, 0.001)
    assert first.cpu_s == pytest.approx(0.031)
    assert (first.wait_s, first.loop_s, second.wait_s, second.loop_s) == (1.0, 0.0, 0.5, 3.0)
    sums = accounts.sums()
    assert [sums[name] for name in ("read_s", "loop_s", "wait_s")] == [pytest.approx(0.2), 3.0, 1.5]
    times = accounts.times(None)
    assert (times["wait_p50_s"], times["wait_p99_s"], times["wait_max_s"]) == (0.5, 1.0, 1.0)


def test_the_time_of_a_break_is_not_the_loops_own():
    accounts = Accounts(ahead=1)
    for asked in (1.0, 2.0, 3.0, 4.0):
        delivered(accounts, asked, asked)
    accounts.interrupted()
    for asked in (100.0, 101.0, 102.0):
        delivered(accounts, asked, asked + 0.5)
    # not judged: the batch that was read ahead, and two that are made while the step compiles
    assert [batch.loop_s for batch in latest(accounts)] == [1.0, 0.0, 0.5, 0.5]
    assert accounts.sums()["loop_s"] == 4.0
    window = accounts.window()
    assert (window.loop_s, window.wait_s) == (2 / 4, 1.5 / 4)  # the first wait after the break counts


def test_a_window_after_a_change_has_only_batches_that_were_made_since():
    accounts = Accounts(ahead=-2)
    for asked in (1.0, 2.0, 3.0):
        delivered(accounts, asked, asked)
    accounts.restarted(ahead=1)
    assert accounts.window(current=True) is None
    assert len(accounts.window().batches) == 3
    now = time.perf_counter()
    for step in range(1, 7):
        delivered(accounts, now + step, now + step)
    # without the first three batches of the new pipeline
    assert len(accounts.window(current=True).batches) == len(accounts.window().batches) == 3


def test_a_rare_pause_of_the_loop_is_left_out_and_a_wait_for_each_tenth_step_is_not():
    for count, pauses in ((100, {50: 4.0}), (100, {10 * i: 0.5 for i in range(1, 10)})):
        accounts, now = Accounts(ahead=0), 0.0
        for i in range(count):
            now += 0.002 + pauses.get(i, 0.0)
            delivered(accounts, now, now + 0.003)
            now += 0.003
        window = accounts.window()
        assert window.loop_s == pytest.approx(0.002 if len(pauses) == 1 else 0.002 + 0.5 * 9 / 98)
        assert window.wait_s == pytest.approx(0.003)


def test_a_transfer_that_ends_after_the_batch_was_taken_is_late():
    accounts = Accounts(ahead=-1)
    delivered(accounts, 1.0, 1.0, placing=(0.5, 0.1), ready_s=0.1)
    delivered(accounts, 2.0, 2.0, placing=(1.5, 0.1))
    delivered(accounts, 3.0, 3.0, placing=(2.5, 0.1))
    accounts._transfers.append((1.5, 1.25))  # ready at 2.75, and taken at 2.0
    assert [batch.late_s for batch in latest(accounts)] == [0.75, None]
    window = accounts.window()
    assert accounts.times(window)["transfer_s"] == pytest.approx((0.1 + 1.25) / 2)
    assert window.late_s == 0.75
    assert window.au == pytest.approx(0.25) == 1 - window.wait_share


# --- glances: looks at the devices at random moments ---


@pytest.mark.parametrize("kind", ["loop", "next"])
def test_a_glance_counts_where_the_loop_was(kind):
    """A glance in the loop's own time tells whether the devices are idle; one in `next`, whether they compute."""
    accounts, step_s = Accounts(ahead=-2), 1.0
    for step in range(1, 21):
        at = step + 0.25 if kind == "next" else step + 0.75  # `next` returns at step + 0.5
        accounts._glances.append(Glance(at, computes=step % 4 == 0, idle=step % 4 > 1))
        delivered(accounts, step * step_s, step * step_s + 0.5)
        if step == 3:
            assert (accounts.window().idle_s, accounts.window().wait_s) == (None, 0.5)  # too few glances
    window = accounts.window()
    if kind == "loop":
        assert window.idle_s == pytest.approx(window.loop_s * 10 / 19)  # the last loop has not ended
        assert window.wait_s == 0.5
    else:
        assert (window.idle_s, window.wait_s) == (None, pytest.approx(0.5 * 0.75))
        assert window.period_s == pytest.approx((19 * 0.5 + 20 * 0.5) / 20)  # as without glances


def test_glances_while_the_buffers_fill_and_in_breaks_and_pauses_do_not_count():
    accounts, now = Accounts(ahead=1), 0.0
    for step in range(1, 101):
        began, now = now, now + (40.0 if step == 50 else 1.0)
        elsewhere = step in (1, 2, 3, 20, 50)  # 1 to 3: the step compiles; 20: a break; 50: a pause
        for glance in range(20 if step == 50 else 1):
            accounts._glances.append(Glance(began + 0.5 + glance, not elsewhere, elsewhere))
        if step == 20:
            accounts.interrupted()
        delivered(accounts, now, now)
    assert (accounts.window().loop_s, accounts.window().idle_s) == (pytest.approx(0.99, abs=0.01), 0.0)


def test_no_cycle_keeps_the_accounts_alive():
    """A cycle would keep a dropped feed's source and buffers until the garbage collector runs."""
    accounts = Accounts(ahead=0)
    accounts.placed(PlaceTimes("place", 0.0, 0.0, 0.0), [jax.numpy.zeros(2)])
    gone = weakref.ref(accounts)
    del accounts
    assert gone() is None


# --- asked for by several threads ---


def test_a_signal_handler_may_ask_while_batches_are_added_up():
    accounts, asked = Accounts(ahead=-2), []
    accounts.record_with(lambda record: asked.append(accounts.sums()["wait_s"]))
    for step in range(5):
        delivered(accounts, step, step + 0.5)
    assert accounts.sums()["wait_s"] == 2.5
    assert asked == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_several_threads_may_ask_while_the_loop_goes_on():
    accounts, asking = Accounts(ahead=0), True

    def ask():
        while asking:
            accounts.window()

    threads = [spawn(ask) for _ in range(3)]
    for i in range(300):
        delivered(accounts, i + 0.0, i + 0.25, part=(1.0, 0, 0))
    asking = False
    assert [thread.result(PATIENCE_S) for thread in threads] == [None] * 3
    assert [accounts.sums()[name] for name in ("read_s", "wait_s", "loop_s")] == [300, 75, 0.75 * 299]
    assert len(latest(accounts)) == 256


def test_a_trace_may_end_while_another_thread_adds_up():
    recorded = []

    class Ending(Accounts):
        """The first read of the recorder finds one, the second finds none."""

        _recorder = property(lambda self: recorders.pop(), lambda self, recorder: None)

    recorders, accounts = [None, recorded.append], Ending(ahead=0)
    delivered(accounts, 1.0, 1.5)
    assert accounts.sums()["wait_s"] == 0.5
    assert len(recorded) == 1


def test_an_interrupt_while_records_are_added_up_stops_nothing(monkeypatch):
    accounts = Accounts(ahead=0)
    delivered(accounts, 0, 0)
    monkeypatch.setattr(Accounts, "_add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        accounts.window()
    monkeypatch.undo()
    for i in range(1, 20):
        delivered(accounts, i, i)
    assert accounts.sums()["loop_s"] == 18
    assert spawn(accounts.window).result(PATIENCE_S).loop_s == 1.0  # another thread may ask, too


# --- real feeds ---


@pytest.mark.slow
def test_statistics_of_a_real_feed_count_what_its_stages_slept():
    seen = []
    stages = {"read": 2 * LOOP_S, "host": 2 * LOOP_S, "place": LOOP_S}
    trained(**stages, steps=20, watch=lambda feed: seen.append(feed.statistics()))
    first, last = seen[0], seen[-1]
    slept = (last.batches - first.batches) * LOOP_S
    for name, factor in (("read_s", 2), ("transform_s", 2), ("place_s", 1), ("loop_s", 1)):
        assert getattr(last, name) - getattr(first, name) >= factor * slept
    assert 0 < last.wait_p50_s <= last.wait_p99_s <= last.wait_max_s
    assert last.placed_bytes == last.batches * ROWS * 4 * 4
    assert last.host_bytes >= 3 * ROWS * 4 * 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["read", "host", "place"])
def test_a_stage_that_takes_five_times_as_long_as_the_loop_binds(stage):
    report = trained(**{stage: 10 * LOOP_S}, steps=30)  # two threads share the work
    assert report.bound == stage
    assert report.wait_share > 0.5


def test_a_feed_that_is_waited_for_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(listening, "_WARN_AFTER_S", 0.3)
    with caplog.at_level(logging.WARNING, "feedline"):
        trained(read=2 * LOOP_S, loop=0.0, steps=240)
    (record,) = (record for record in caplog.records if record.name == "feedline")
    assert "the loop waits for input" in record.message  # reading limits training, unless the machine is busy
    assert "; advice: " in record.message


def test_a_fault_in_what_listens_does_not_end_training(monkeypatch, caplog):
    monkeypatch.setattr(listening, "_WARN_AFTER_S", 0.1)
    monkeypatch.setattr("feedline._src.listen.listening.judge", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the report at the end, which the caller asked for
        trained(read=2 * LOOP_S, loop=0.0, steps=160)
    assert "could not judge" in caplog.text


def test_a_report_is_an_error_while_batches_come_that_were_read_ahead():
    with feedline.Feed({"x": np.zeros(64)}, 8, ONE) as feed:
        for count in range(feed.reading.buffer + feed.prefetch + 3):
            with pytest.raises(ValueError, match=rf"needs more .* delivered {count} in all; call report\(\)"):
                feed.report()
            next(feed)
        next(feed)
        assert feed.report().batches == 1
