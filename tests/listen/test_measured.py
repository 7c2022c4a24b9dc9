"""When a setting is judged, by what, and what a limit allows."""

import dataclasses
import itertools

import pytest
from simulated import ALL, START, Load, bounds

from feedline._src.listen.candidates import Candidate, candidates, exceeds_cores
from feedline._src.listen.search import Measured, Tuning, _is_enough
from feedline._src.listen.window import Window
from feedline._src.options import Settings

WAITS = Load(make_s=0.040, place_s=0.0, loop_s=0.010)


def steps(times, base=WAITS, settings=START):
    """A window of batches whose steps took these times, half of each waiting."""
    window, how = base.measured(settings)
    ends = itertools.accumulate(times)
    batches = [
        batch._replace(taken=taken, wait_s=step / 2, loop_s=step / 2, slot_s=1.0)
        for batch, step, taken in zip(itertools.cycle(window.batches), times, ends, strict=False)
    ]
    return Window(batches, len(batches), True), how


def uneven(count, step_s):
    """Steps whose means vary by far more than 2 %."""
    return [step_s * (0.2 if i // 8 % 2 else 1.8) for i in range(count)]


@pytest.mark.parametrize(
    ("times", "enough"),
    [
        ([0.1] * 31, False),  # too few batches
        ([0.1] * 32, True),
        ([0.01] * 49, False),  # less than half a second
        ([0.01] * 53, True),
        ([0.001] * 127, False),
        ([0.001] * 128, True),  # as many batches as are needed in any case
        (uneven(64, 0.1), False),  # too noisy
        (uneven(128, 0.1), True),
        (uneven(64, 0.3), True),  # 19 s: it is not measured for longer
    ],
)
def test_a_setting_is_judged_by_enough_batches_for_long_enough(times, enough):
    assert _is_enough(*steps(times)) is enough


def test_a_fifth_is_a_gain_however_noisy_the_steps_are():
    before = Measured(0.010, 0.005, 0.5)
    assert Measured(0.0079, 0.005, 0.5).is_faster_than(before)
    assert not Measured(0.0081, 0.005, 0.5).is_faster_than(before)


def test_what_threads_that_compute_wait_for_the_gil_is_waiting():
    window, how = steps([0.010] * 64)
    window = dataclasses.replace(window, batches=[each._replace(host_cpu_s=2.0) for each in window.batches])
    held = dataclasses.replace(how, lock_wait_s=0.002)
    assert Measured.of(window, how).wait_share == pytest.approx(0.5)
    assert Measured.of(window, held).wait_share == pytest.approx(0.7)
    workers = dataclasses.replace(held, reader="workers", threads=0, workers=2)
    assert Measured.of(window, workers).wait_share == pytest.approx(0.5)
    most = dataclasses.replace(how, lock_wait_s=1.0)  # no more than the loop's own time
    assert Measured.of(window, most).wait_share == pytest.approx(1.0)


def settled(tuning, now):
    """Looks at the same load until the search ends. Returns when that was."""
    at = 0.0
    while not tuning.settled:
        window, how = WAITS.measured(now, at)
        at = window.batches[-1].taken
        now = tuning.propose(window, how) or now
    return at, now


def test_the_pause_between_searches_doubles():
    tuning = Tuning(bounds(WAITS, frozenset({"prefetch"})), START)
    at, now = settled(tuning, START)
    slower = dataclasses.replace(WAITS, make_s=0.4)
    searches = []
    for pause_s in (60, 120, 240):
        for early in (True, False):
            window, how = slower.measured(now, at)
            shift = at + pause_s + (-5 if early else 5) - window.batches[-1].taken
            window = dataclasses.replace(
                window, batches=[batch._replace(taken=batch.taken + shift) for batch in window.batches]
            )
            tuning.propose(window, how)
            searches.append(tuning.settled or "again")
            if not early:
                at = window.batches[-1].taken
        slower = dataclasses.replace(slower, make_s=10 * slower.make_s)
        while not tuning.settled:
            window, how = slower.measured(now, at)
            at = window.batches[-1].taken
            now = tuning.propose(window, how) or now
    told = [sentence for sentence in tuning.history if sentence.startswith("searches again")]
    assert (searches, len(told)) == ([True, "again"] * 3, 3)


def test_no_worker_is_tried_from_an_older_list_after_workers_failed():
    tuning = Tuning(bounds(WAITS), START)
    tuning.propose(*WAITS.measured(START))
    tuning._best = START._replace(threads=8)
    tuning._left = [Candidate(Settings(0, 4, 2, 2), "it waits"), Candidate(START._replace(threads=3), "it waits")]
    tuning.give_up_workers("WorkerError: killed", START)
    assert tuning.propose(*WAITS.measured(START)) == START._replace(threads=3)


def test_limits_of_workers():
    limits = dataclasses.replace(bounds(WAITS), cores=4)
    assert limits.allow(Settings(0, 4, 2, 2))
    assert not limits.allow(Settings(0, 5, 1, 2))
    given = dataclasses.replace(limits, tunable=ALL - {"workers"})
    assert given.allow(Settings(0, 5, 1, 2))  # the user's own number


def test_no_more_threads_than_cores_never_exceed_the_cores():
    """Though the processor time of their batches may say so: it is measured by another clock."""
    window, how = dataclasses.replace(WAITS, busy=1.0).measured(START)
    batches = [batch._replace(read_cpu_s=2 * batch.read_cpu_s) for batch in window.batches]
    window, limits = dataclasses.replace(window, batches=batches), bounds(WAITS)
    assert not exceeds_cores(window, how, dataclasses.replace(limits, cores=2))
    assert exceeds_cores(window, how, dataclasses.replace(limits, cores=1))


def test_the_first_candidate_promises_about_the_most():
    for load in (WAITS, Load(0.006, 0.0, 0.010, every=10), Load(0.001, 0.030, 0.010)):
        found = candidates(*load.measured(START), bounds(load))
        measured = [load.step_s(each.settings) for each in found if "promises" in each.reason]
        assert measured[0] <= 1.05 * min(measured)


@pytest.mark.parametrize(("count", "again"), [(63, False), (64, True)])
def test_each_half_of_a_window_must_be_long_enough_for_a_new_search(count, again):
    hardly_waits = dataclasses.replace(WAITS, make_s=0.001)
    tuning = Tuning(bounds(WAITS), START)
    assert tuning.propose(*hardly_waits.measured(START)) is None
    assert tuning.settled
    window, how = WAITS.measured(START, at=1000.0)
    tuning.propose(dataclasses.replace(window, batches=window.batches[:count], last=count), how)
    assert tuning.settled is not again
