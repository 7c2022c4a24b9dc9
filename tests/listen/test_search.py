"""Tuning finds, by measurements of a simulated feed, settings about as good as an exhaustive search finds."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated import ALL, START, Load, bounds, exhaustive

from feedline._src.listen.search import MAX_CHANGES, Measured, Tuning
from feedline._src.listen.verdict import judge
from feedline._src.options import Settings

MEMORY = Load(make_s=0.004, place_s=0.001, loop_s=0.010, busy=1.0)
SLOW_DISK = Load(make_s=0.080, place_s=0.001, loop_s=0.010)
HOLDS_LOCK = Load(make_s=0.030, place_s=0.0005, loop_s=0.010, busy=1.0, holds_lock=True)
DECODE = Load(make_s=0.050, place_s=0.0005, loop_s=0.010, busy=1.0)
SLOW_TRANSFER = Load(make_s=0.001, place_s=0.030, loop_s=0.010)
CALLS = Load(make_s=0.001, place_s=0.0005, loop_s=0.004, call_s=0.015)
UNEVEN = Load(make_s=0.006, place_s=0.0, loop_s=0.010, every=10)
# an example that fails takes too long to be made smaller
QUICKLY = settings(max_examples=30, derandomize=True, phases=[Phase.explicit, Phase.generate])
LOADS = {
    "memory": MEMORY,
    "slow disk": SLOW_DISK,
    "holds lock": HOLDS_LOCK,
    "decode": DECODE,
    "slow transfer": SLOW_TRANSFER,
    "fixed time per call": CALLS,
    "uneven": UNEVEN,
}


class Run:
    """A loop over a simulated feed that does what the tuning proposes, until the search ends."""

    def __init__(self, load, limits, *, start=START, noise=0.0, most=100):
        self.load, self.at, self.noise = load, 0.0, noise
        self.tuning, self.now, self.tried, self.looks = Tuning(limits, start), start, [], itertools.count()
        for _ in range(most):
            if self.tuning.settled:
                return
            self.look()
        assert most == 0, f"no end: {list(self.tuning.history)}"

    def look(self):
        window, how = self.load.measured(self.now, self.at, self.noise, seed=next(self.looks))
        self.at = window.batches[-1].taken
        proposed = self.tuning.propose(window, how)
        if proposed is not None:
            assert proposed != self.now
            self.now = proposed
            self.tried.append(proposed)
        return proposed


def assert_sound(run, limits):
    """What holds for any load: the limits, few changes, none twice but going back, and quiet in the end."""
    assert all(limits.allow(each) for each in run.tried)
    for each in run.tried:  # where workers read, threads do not
        given = ALL - limits.tunable - ({"threads"} if each.workers else set())
        assert all(getattr(each, name) == getattr(START, name) for name in given)
    assert len(run.tried) <= MAX_CHANGES + 1
    assert all(run.tried.count(each) == 1 for each in run.tried[:-1] if each != run.now)
    assert START not in run.tried[:-1]
    run.at += 1000  # a new search would be allowed
    assert [run.look() for _ in range(20)] == [None] * 20


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", LOADS)
def test_it_is_as_good_as_an_exhaustive_search(name, noise):
    load, limits = LOADS[name], bounds(LOADS[name])
    run = Run(load, limits, noise=noise)
    assert_sound(run, limits)
    assert load.step_s(run.now) <= 1.1 * exhaustive(load, limits), list(run.tuning.history)


def test_what_the_loads_need():
    assert Run(MEMORY, bounds(MEMORY)).tried == []
    assert Run(SLOW_DISK, bounds(SLOW_DISK)).now.threads >= 8
    assert Run(HOLDS_LOCK, bounds(HOLDS_LOCK)).now.workers >= 3
    assert Run(DECODE, bounds(DECODE)).now[:2] in {(6, 0), (8, 0)}
    assert Run(SLOW_TRANSFER, bounds(SLOW_TRANSFER)).now.threads >= 4
    uneven = Run(UNEVEN, bounds(UNEVEN, tunable=frozenset({"buffer", "prefetch"}))).now
    assert uneven.buffer + uneven.prefetch >= 6


def followed(now, report):
    """The settings after a report's advice; None: it names none."""
    change = report.change
    if change is not None:
        sizes = {} if change.buffer is None else {"buffer": change.buffer[1]}
        if change.setting == "Reading.workers":
            sizes["threads"] = 0
        return now._replace(**{change.setting.removeprefix("Reading."): change.then}, **sizes)
    buffer = re.match(r"buffer (\d+) → (\d+): ", report.advice)
    assert buffer is None or int(buffer[1]) == now.buffer
    return now._replace(buffer=int(buffer[2])) if buffer else None


@pytest.mark.parametrize("load", [CALLS, SLOW_DISK, dataclasses.replace(CALLS, make_s=0.020), UNEVEN])
@pytest.mark.parametrize("start", [START, Settings(7, 0, 2, 2), Settings(16, 0, 3, 2)])
def test_each_advice_keeps_its_promise_until_the_loop_hardly_waits(load, start):
    now, seen = start, []
    while (report := judge(*load.measured(now))).wait_share >= 0.05:
        assert now not in seen
        seen.append(now)
        now = followed(now, report)
        if report.change is not None:
            assert judge(*load.measured(now)).wait_share <= report.change.wait_share + 0.02, (seen, now)
    assert len(seen) <= 4


SERVES_TWO = dataclasses.replace(SLOW_DISK, at_a_time=2)


@pytest.mark.parametrize("load", [*LOADS.values(), SERVES_TWO, dataclasses.replace(SERVES_TWO, every=10)])
@pytest.mark.parametrize("start", [START, Settings(7, 0, 2, 2), Settings(64, 0, 32, 2), Settings(64, 0, 20, 2)])
def test_advice_that_is_followed_in_vain_comes_to_an_end(load, start):
    """No report knows of those before it: each advice makes something larger, and nothing smaller."""
    now, seen = start, [start]
    while (report := judge(*load.measured(now))).wait_share >= 0.05 and (after := followed(now, report)):
        assert after != now
        if not after.workers:
            assert all(b >= a for a, b in zip(now, after, strict=True)), report.advice
        now = after
        seen.append(now)
        assert len(seen) <= 5, seen


def test_the_last_advice_says_that_threads_may_have_been_in_vain():
    report = judge(*SERVES_TWO.measured(Settings(16, 0, 16, 2)))
    assert report.advice.startswith(
        "no setting helps: storage is slower than training; if fewer threads are as fast, go back to them; read "
    )


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("loop_s", [0.003, 0.004])
def test_fewer_calls_are_promised_where_batches_of_two_sizes_show_what_a_call_costs(loop_s, noise):
    load = dataclasses.replace(CALLS, loop_s=loop_s, sizes=(64, 32))
    report = judge(*load.measured(Settings(7, 0, 2, 2), noise=noise))
    assert (report.change.setting, report.change.then, report.change.buffer) == ("Reading.buffer", 8, None)
    after = judge(*load.measured(Settings(7, 0, 8, 2), noise=noise))
    assert after.wait_share == pytest.approx(report.change.wait_share, abs=0.06)


def test_fewer_calls_are_not_advised_where_their_rows_cost_all_the_time():
    report = judge(*dataclasses.replace(SLOW_DISK, loop_s=0.003, sizes=(64, 32)).measured(Settings(7, 0, 2, 2)))
    assert (report.change.setting, report.change.then) == ("Reading.threads", 16)


def test_fewer_calls_are_tried_first_where_no_promise_ends_the_waits_and_once():
    """Batches of one size do not tell: they may help most, and if they do not, there is nothing to try again."""
    for load, helps in [(CALLS, True), (SLOW_DISK, False)]:
        load = dataclasses.replace(load, loop_s=0.002, place_s=0.0)
        report = judge(*load.measured(Settings(7, 0, 2, 2)))
        assert report.change is None
        assert report.advice.startswith("buffer 2 → 7: wait ")
        assert ", if a call takes as long for fewer rows" in report.advice
        after = judge(*load.measured(Settings(7, 0, 7, 2)))
        assert (after.wait_share < report.wait_share / 2) is helps
        assert after.change.setting == "Reading.threads"


@pytest.mark.slow
@QUICKLY
@given(
    load=st.builds(
        Load,
        make_s=st.floats(0.0005, 0.2),
        place_s=st.floats(0.0, 0.03),
        loop_s=st.floats(0.004, 0.02),
        busy=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        every=st.sampled_from([1, 1, 4, 12]),
        cores=st.sampled_from([1, 2, 8]),
        at_a_time=st.sampled_from([2, 1000]),
    ),
    tunable=st.sets(st.sampled_from(sorted(ALL)), min_size=1).map(frozenset),
    batches=st.integers(12, 200),
    noise=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_any_load_keeps_the_limits_and_comes_to_an_end(load, tunable, batches, noise):
    limits = bounds(load, tunable, host_batches=batches, device_batches=batches)
    run = Run(load, limits, noise=noise)
    assert_sound(run, limits)
    assert all(load.allows(each) for each in run.tried if each.threads > START.threads) or noise
    assert load.step_s(run.now) <= load.step_s(START) * (1.05 if noise < 0.3 else 1.15)
    again = Run(load, limits, noise=noise)
    assert (again.tried, list(again.tuning.history)[:5]) == (run.tried, list(run.tuning.history)[:5])


@pytest.mark.slow
@QUICKLY
@given(
    make=st.floats(0.1, 8), place=st.floats(0.0, 2.0),
    kind=st.sampled_from([{"busy": 1.0}, {"busy": 0.05}, {"every": 4}, {"busy": 1.0, "holds_lock": True}]),
)  # fmt: skip
def test_any_load_ends_near_the_optimum(make, place, kind):
    load = Load(make * 0.01, place * 0.01, 0.01, **kind)
    limits = bounds(load)
    run = Run(load, limits, noise=0.02)
    assert load.step_s(run.now) <= 1.1 * exhaustive(load, limits), list(run.tuning.history)


def test_a_window_that_is_too_short_or_not_drained_is_no_reason():
    window, how = SLOW_DISK.measured(START)
    tuning = Tuning(bounds(SLOW_DISK), START)
    few = window.batches[:31]
    assert tuning.propose(dataclasses.replace(window, batches=few, last=31), how) is None
    assert tuning.propose(dataclasses.replace(window, drained=False), how) is None
    assert not tuning.history
    assert tuning.propose(window, how) is not None


def stream_that_waits(**load):
    """A look at a stream, which one thread reads."""
    window, how = Load(place_s=0.0, **load).measured(START._replace(threads=1))
    return window, dataclasses.replace(how, reader="stream", threads=0)


def test_a_stream_is_opened_again_only_if_the_simulation_promises_a_gain():
    """Its own workers take seconds to start."""
    for load, expected in [({"make_s": 0.030, "loop_s": 0.010}, None), ({"make_s": 0.008, "loop_s": 0.010}, 8)]:
        window, how = stream_that_waits(**load, every=10 if expected else 1)
        limits = bounds(SLOW_DISK, tunable=frozenset({"prefetch"}))
        proposed = Tuning(limits, how.settings).propose(window, how)
        assert (proposed and proposed.prefetch) == expected


def test_a_proposal_that_was_not_taken_up_is_repeated():
    window, how = SLOW_DISK.measured(START)
    tuning = Tuning(bounds(SLOW_DISK), START)
    proposed = tuning.propose(window, how)
    assert tuning.propose(window, how) == proposed
    assert len(tuning.history) == 1


def test_a_loop_that_becomes_much_slower_is_looked_at_again_after_a_while():
    run = Run(MEMORY, bounds(MEMORY))
    run.load = SLOW_DISK
    assert run.look() is None  # too soon after the search
    run.at += 60
    assert run.look() is not None
    assert any(sentence.startswith("searches again") for sentence in run.tuning.history)
    while not run.tuning.settled:
        run.look()
    assert SLOW_DISK.step_s(run.now) <= 1.1 * exhaustive(SLOW_DISK, bounds(SLOW_DISK))


def test_a_loop_that_becomes_faster_than_its_input_is_looked_at_again_after_a_while():
    """Its steps are shorter than before, but it waits."""
    slow_steps = dataclasses.replace(SLOW_DISK, loop_s=0.060)
    run = Run(slow_steps, bounds(SLOW_DISK))
    assert run.tried == []
    run.load = SLOW_DISK
    run.at += 60
    assert run.look() is not None
    while not run.tuning.settled:
        run.look()
    assert SLOW_DISK.step_s(run.now) <= 1.1 * exhaustive(SLOW_DISK, bounds(SLOW_DISK))


def test_a_single_long_wait_is_no_reason():
    run = Run(MEMORY, bounds(MEMORY))
    window, how = MEMORY.measured(run.now, run.at + 1000)
    for place in (5, 100):
        batches = list(window.batches)
        batches[place] = batches[place]._replace(wait_s=5.0)
        assert run.tuning.propose(dataclasses.replace(window, batches=batches), how) is None


def test_settings_that_were_measured_are_not_tried_again():
    """Fewer threads seem faster, since the machine became faster meanwhile: the search goes on from there."""
    crowded = Load(make_s=0.020, place_s=0.0, loop_s=0.004, busy=1.0, cores=2)
    run = Run(crowded, bounds(crowded), most=0)
    assert run.look().threads == 1
    run.load = dataclasses.replace(crowded, make_s=0.008)
    while not run.tuning.settled:
        run.look()
    assert run.tuning.history[1].startswith("keeps threads 2 → 1: ")
    assert START not in run.tried


def test_a_loop_that_becomes_slower_by_itself_is_no_reason():
    run = Run(MEMORY, bounds(MEMORY))
    run.at += 1000
    run.load = dataclasses.replace(MEMORY, loop_s=0.1)
    assert [run.look() for _ in range(5)] == [None] * 5


def test_threads_that_begin_to_compute_become_no_more_than_the_cores():
    cached = dataclasses.replace(SLOW_DISK, busy=1.0, cores=2)
    run = Run(dataclasses.replace(SLOW_DISK, cores=2), bounds(cached))
    assert run.now.threads > 2
    run.load = dataclasses.replace(cached, cores=8)  # of the machine; the limit is 2
    assert run.look().threads == 2
    for _ in range(20):
        run.look()
    assert run.tuning.settled
    assert run.now.threads == 2


def test_workers_that_fail_are_not_tried_again():
    run = Run(HOLDS_LOCK, bounds(HOLDS_LOCK))
    assert run.now.workers
    run.tuning.give_up_workers("WorkerError: no /dev/shm", START)
    run.now = START
    while not run.tuning.settled:
        run.look()
    assert run.now.workers == 0
    assert "goes back to threads, because workers failed with WorkerError: no /dev/shm" in run.tuning.history


def test_a_search_after_workers_failed_is_a_whole_one():
    """They may have read for hours, and the search that chose them may have used up its changes."""
    run = Run(HOLDS_LOCK, bounds(HOLDS_LOCK))
    run.tuning._changes = MAX_CHANGES
    run.tuning.give_up_workers("WorkerError: killed", START)
    run.now, run.load = START, SLOW_DISK
    while not run.tuning.settled:
        run.look()
    assert SLOW_DISK.step_s(run.now) <= 1.1 * exhaustive(SLOW_DISK, run.tuning._bounds)


def test_sentences():
    run = Run(SLOW_DISK, bounds(SLOW_DISK))
    first, second, *_, last = run.tuning.history
    assert first == (
        "tries threads 2 → 8, buffer 2 → 8, because the loop waits 75 % of the time and a simulation promises "
        "10.1 ms a step"
    )
    assert second == (
        "keeps threads 2 → 8, buffer 2 → 8: 10.1 ms a step, wait 1 %, before 40.5 ms a step, wait 75 %"
    )
    assert last.startswith("stays with threads 8, workers 0, buffer 8, prefetch 2: ")


def last_sentence(load, **options):
    return Run(load, bounds(load, **options)).tuning.history[-1]


def test_the_last_sentence_names_only_settings_that_are_auto_and_in_use():
    found = last_sentence(HOLDS_LOCK)
    assert found.startswith("stays with workers 6, buffer 2, prefetch 2: ")
    assert last_sentence(MEMORY, tunable=frozenset({"prefetch"})).startswith("stays with prefetch 2: ")
    assert last_sentence(MEMORY, tunable=frozenset({"workers"})).startswith("stays with workers 0: ")


def test_a_try_of_fewer_threads_is_explained():
    crowded = Load(make_s=0.020, place_s=0.0, loop_s=0.004, busy=1.0, cores=2)
    run = Run(crowded, bounds(crowded))
    fewer = [told for told in run.tuning.history if told.startswith("tries threads 2 → 1, ")]
    assert fewer == [
        "tries threads 2 → 1, because the loop waits 60 % of the time and threads may hinder each other"
    ]


def test_faster_means_by_more_than_the_noise():
    before = Measured(0.010, 0.0002, 0.5)
    assert Measured(0.009, 0.0002, 0.5).is_faster_than(before)
    assert not Measured(0.0096, 0.0002, 0.5).is_faster_than(before)
    assert not Measured(0.0099, 0.0, 0.5).is_faster_than(Measured(0.010, 0.0, 0.5))


def test_limits_count_what_settings_use():
    limits = bounds(MEMORY)
    assert limits.host_use(Settings(4, 0, 2, 2)) == 6
    assert dataclasses.replace(limits, arrays_on_host=True).host_use(Settings(4, 0, 2, 2)) == 10
    assert limits.device_use(Settings(4, 0, 2, 2)) == 6
    assert Settings(0, 2, 4, 2).shared_batches == 14
