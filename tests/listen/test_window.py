"""Which batches a verdict counts, and the rate of the input that a full queue hides."""

import pytest

from feedline._src.listen.accounting import BatchTimes
from feedline._src.listen.window import Window

LOOP_S = 0.010


def batch(taken, *, loop=LOOP_S, wait=0.0, slot=0.0, queued=0.0, drained=True):
    return BatchTimes(
        taken=taken, read_s=0.0, transform_s=0.0, stage_s=0.0, place_s=0.0, read_cpu_s=0.0, host_cpu_s=0.0,
        place_cpu_s=0.0, slot_s=slot, queued_s=queued, empty_s=0.0, wait_s=wait, late_s=None, loop_s=loop,
        drained=drained,
    )  # fmt: skip


def test_until_the_buffers_have_drained_the_first_batch_and_the_step_that_compiled_do_not_count():
    first = batch(0.0, loop=None, wait=3.0, drained=False)
    compiled = batch(1.0, loop=15 * LOOP_S, drained=False)  # too short to pass for a pause
    usual = [batch(1.0 + i * LOOP_S, drained=False) for i in range(1, 6)]
    window = Window.of([first, compiled, *usual])
    assert list(window.batches) == usual
    assert (window.last, window.drained, window.loop_s) == (5, False, pytest.approx(LOOP_S))


def test_if_there_is_no_other_step_the_one_that_compiled_counts():
    compiled = batch(1.0, loop=0.5, drained=False)
    assert Window.of([batch(0.0, loop=None, drained=False), compiled]).batches == [compiled]


def test_drained_batches_count_alone_and_a_break_ends_the_latest_ones():
    early = [batch(i * LOOP_S, drained=False) for i in range(5)]
    later = [batch(1.0 + i * LOOP_S, loop=None if i == 3 else LOOP_S) for i in range(10)]
    window = Window.of(early + later)
    assert (list(window.batches), window.last, window.drained) == (later, 6, True)
    assert Window.of([batch(0.0, loop=None)]) is None
    assert Window.of([]) is None


def queue_that_drains(count, input_s, slots=()):
    """Batches that are put every `input_s` and taken without waiting every `LOOP_S`, from a full queue.

    Those with the numbers `slots` waited for a slot, and were put an hour later than they could have been.
    """
    late = [3600.0 * sum(slot <= i for slot in slots) for i in range(count)]
    puts = [late[i] + i * input_s for i in range(count)]
    takes = [10_000.0 * (1 + len(slots)) + i * LOOP_S for i in range(count)]
    return [
        batch(taken, slot=3600.0 if i in slots else 0.0, queued=taken - put)
        for i, (taken, put) in enumerate(zip(takes, puts, strict=True))
    ]


def test_a_full_queue_does_not_hide_a_slow_input():
    window = Window(queue_that_drains(100, input_s=0.015), 100, True)
    assert window.wait_s == pytest.approx(0.005)
    assert window.au == pytest.approx(10 / 15)
    assert Window(queue_that_drains(100, input_s=0.005), 100, True).wait_s == 0.0


def test_the_rate_counts_from_the_last_batch_that_waited_for_a_slot():
    """Until then it was the loop that limited the input."""
    found = [
        Window(queue_that_drains(100, input_s=0.015, slots=slots), 100, True).wait_s
        for slots in [(20,), (5, 49), (50,), (99,), range(100)]
    ]
    assert found == [pytest.approx(0.005), pytest.approx(0.005), 0.0, 0.0, 0.0]


def test_a_short_wait_for_a_slot_is_no_limit():
    for share, expected in [(0.4, 0.005), (0.6, 0.0)]:
        batches = queue_that_drains(100, input_s=0.015)
        batches[70] = batches[70]._replace(slot_s=share * LOOP_S)
        assert Window(batches, 100, True).wait_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("count", "last", "hidden_s"), [(8, 8, 0.0), (9, 9, 0.005), (100, 50, 0.0), (100, 51, 0.005)]
)
def test_the_rate_needs_a_run_of_batches(count, last, hidden_s):
    """More than eight, and more than half of those that count, without a break."""
    assert Window(queue_that_drains(count, input_s=0.015), last, True).wait_s == pytest.approx(hidden_s)


def test_what_the_loop_waited_counts_if_it_is_more():
    batches = [each._replace(wait_s=0.020) for each in queue_that_drains(100, input_s=0.015)]
    assert Window(batches, 100, True).wait_s == pytest.approx(0.020)


def test_au_is_the_share_of_the_time_in_which_the_devices_compute():
    """Half of the time in `next` they still compute; of the loop's own they are idle for nine tenths."""
    batches = [batch(i * 0.012, wait=0.002)._replace(computed_s=0.001, late_s=0.0005) for i in range(20)]
    window = Window.of(batches, 0.9)
    assert window.period_s == pytest.approx(0.012)
    assert window.wait_share == pytest.approx((0.001 + 0.0005) / 0.012)
    assert window.idle_s == pytest.approx(0.009)
    assert window.au == pytest.approx((0.012 - 0.0015 - 0.009) / 0.012)
    unknown = Window.of(batches)
    assert unknown.idle_s is None
    assert unknown.au == pytest.approx(1 - unknown.wait_share)
