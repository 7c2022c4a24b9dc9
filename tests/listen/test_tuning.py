"""Tuning that measures a simulated feed finds settings about as good as those of an exhaustive search."""

import dataclasses
import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated import ALL, START, Load, bounds, exhaustive

from feedline._src.listen.accounts import Window
from feedline._src.listen.tuning import MAX_CHANGES, Tuner
from feedline._src.listen.verdict import judge
from feedline._src.options import Settings

MEMORY = Load(make_s=0.004, place_s=0.001, loop_s=0.010, busy=1.0)
SLOW_DISK = Load(make_s=0.080, place_s=0.001, loop_s=0.010)
HOLDS_LOCK = Load(make_s=0.030, place_s=0.0005, loop_s=0.010, busy=1.0, holds_lock=True)
DECODE = Load(make_s=0.050, place_s=0.0005, loop_s=0.010, busy=1.0)
SLOW_TRANSFER = Load(make_s=0.001, place_s=0.030, loop_s=0.010)
CALLS = Load(make_s=0.001, place_s=0.0005, loop_s=0.004, call_s=0.015)
SERVES_TWO = dataclasses.replace(SLOW_DISK, at_a_time=2)
UNEVEN = Load(make_s=0.006, place_s=0.0, loop_s=0.010, every=10)
# no Phase.shrink: it takes too long
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


def looked(tuner, how):
    """What a tuner proposes in these circumstances. Accepts the proposal, as a feed does."""
    tuner.look(how)
    proposal, tuner.proposal = tuner.proposal, None
    return proposal


class Run:
    """A loop over a simulated feed that adopts each proposal, until the search ends."""

    def __init__(self, load, limits=None, *, noise=0.0, most=100):
        self.load, self.at, self.noise, self.looks = load, 0.0, noise, itertools.count()
        self.limits = limits or bounds(load)
        self.tuner, self.now, self.tried = Tuner(self.limits, START), START, []
        self.settle(most)

    def settle(self, most=100):
        for _ in range(most):
            if self.tuner.settled:
                return self
            self.look()
        assert most == 0, f"no end: {list(self.tuner.history)}"
        return self

    def look(self):
        how = self.load.measured(self.now, self.at, self.noise, seed=next(self.looks))
        self.at = how.window.ended
        proposed = looked(self.tuner, how)
        if proposed is not None:
            assert proposed != self.now
            self.now = proposed
            self.tried.append(proposed)
        return proposed

    def assert_optimal(self):
        assert self.load.step_s(self.now) <= 1.15 * exhaustive(self.load, self.limits), list(self.tuner.history)


def assert_sound(run):
    """For any load: limits hold, changes are few, only a return repeats settings, and then nothing changes."""
    assert all(run.limits.allow(each) for each in run.tried)
    for each in run.tried:  # workers replace threads, even a number of threads that must not be tuned
        given = ALL - run.limits.tunable - ({"threads"} if each.workers else set())
        assert all(getattr(each, name) == getattr(START, name) for name in given)
    assert len(run.tried) <= MAX_CHANGES + 1
    assert all(run.tried.count(each) == 1 for each in run.tried[:-1] if each != run.now)
    assert START not in run.tried[:-1]
    run.at += 1000  # a new search would be allowed
    assert [run.look() for _ in range(20)] == [None] * 20


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_it_is_as_good_as_an_exhaustive_search(load):
    run = Run(load, noise=0.1)
    assert_sound(run)
    run.assert_optimal()


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
    assert_sound(run)
    if not noise and load.at_a_time > 2:  # if 2, threads wait for storage and keep no core busy
        most = [each._replace(threads=each.threads * 2 // 3) for each in run.tried if each.threads > START.threads]
        assert all(map(load.allows, most))
    assert load.step_s(run.now) <= load.step_s(START) * (1.05 if noise < 0.3 else 1.15)


def test_a_stream_is_opened_again_only_if_a_gain_is_predicted():
    """The stream's own workers take seconds to start."""
    limits = bounds(SLOW_DISK, tunable=frozenset({"prefetch"}))
    for load, expected in [({"make_s": 0.030}, None), ({"make_s": 0.008, "every": 10}, 8)]:
        how = Load(place_s=0.0, loop_s=0.010, **load).measured(START._replace(threads=1))
        how = dataclasses.replace(how.having(threads=0), stream=True)
        proposed = looked(Tuner(limits, how.settings), how)
        assert (proposed and proposed.prefetch) == expected


def test_a_change_that_was_no_gain_is_not_tried_in_other_sizes():
    run = Run(SERVES_TWO)
    assert len(run.tried) <= 3  # more threads, a larger buffer or prefetch, and back to the start
    assert run.now == START


# --- when it begins again ---


@pytest.mark.parametrize("before", [MEMORY, dataclasses.replace(SLOW_DISK, loop_s=0.060)])
def test_a_loop_that_waits_longer_is_looked_at_again_after_a_while(before):
    """This holds even if the loop's steps are shorter than before."""
    run = Run(before)
    assert run.tried == []
    run.load = SLOW_DISK
    assert run.look() is None  # too soon after the search
    run.at += 60
    assert run.look() is not None
    assert any(sentence.startswith("searches again") for sentence in run.tuner.history)
    run.settle().assert_optimal()
    run.load = dataclasses.replace(SLOW_DISK, make_s=1.0)
    run.at += 100
    assert run.look() is None  # the pause between searches doubles
    run.at += 20
    assert run.look() is not None


def test_a_single_long_wait_or_a_slower_step_is_no_reason():
    run = Run(MEMORY)
    how = MEMORY.measured(run.now, run.at + 1000)
    batches = [how.window.batches[0]._replace(wait_s=0.2), *how.window.batches[1:]]
    assert looked(run.tuner, dataclasses.replace(how, window=Window(batches))) is None
    run.at += 1000
    run.load = dataclasses.replace(MEMORY, loop_s=0.1)
    assert [run.look() for _ in range(5)] == [None] * 5


def test_threads_that_begin_to_compute_become_no_more_than_the_cores():
    cached = dataclasses.replace(SLOW_DISK, busy=1.0, cores=2)
    run = Run(dataclasses.replace(SLOW_DISK, cores=2), bounds(cached))
    assert run.now.threads > 2
    run.load = dataclasses.replace(cached, cores=8)  # the machine's cores; the limit stays 2
    assert run.look().threads == 2
    assert run.settle().now.threads == 2


def test_a_faster_trial_that_keeps_too_many_cores_busy_is_not_kept():
    run = Run(SLOW_DISK, bounds(dataclasses.replace(SLOW_DISK, cores=2)), most=0)
    assert run.look().threads == 8
    run.load = dataclasses.replace(SLOW_DISK, busy=1.0)
    run.look()
    assert run.tuner.history[1].startswith("threads 2 → 8, buffer 2 → 8 is no clear gain: 10.")


def test_workers_that_fail_are_not_tried_again_and_the_search_is_a_whole_one():
    run = Run(HOLDS_LOCK)
    assert run.now.workers
    run.tuner = run.tuner.moved(run.tuner._bounds, run.now).without_workers(OSError("no /dev/shm"))
    assert run.tuner.history[-1] == "goes back to threads 2: workers failed with OSError: no /dev/shm"
    assert run.tuner.proposal == START
    run.tuner.proposal = None
    run.now, run.load = START, SLOW_DISK
    run.settle().assert_optimal()
    assert run.now.workers == 0


# --- following the advice of reports ---


def followed(now, change):
    """The settings after a report's advice."""
    return now._replace(**change.then, **({"threads": 0} if "workers" in change.then else {}))


@pytest.mark.parametrize("load", [CALLS, SLOW_DISK, dataclasses.replace(CALLS, make_s=0.020), UNEVEN])
@pytest.mark.parametrize("start", [START, Settings(7, 0, 2, 2), Settings(16, 0, 3, 2)])
def test_each_advice_keeps_its_promise_until_the_loop_hardly_waits(load, start):
    now, seen = start, []
    while (report := judge(load.measured(now))).wait_share >= 0.05 and report.change is not None:
        assert now not in seen
        seen.append(now)
        now = followed(now, report.change)
        assert judge(load.measured(now)).wait_share <= report.change.wait_share + 0.02, (seen, now)
    assert len(seen) <= 4


@pytest.mark.parametrize("load", [*LOADS.values(), SERVES_TWO, dataclasses.replace(SERVES_TWO, every=10)])
@pytest.mark.parametrize("start", [START, Settings(7, 0, 2, 2), Settings(64, 0, 32, 2)])
def test_advice_that_is_followed_in_vain_comes_to_an_end(load, start):
    """No report knows of those before it: each advice makes something larger, and nothing smaller."""
    seen = [start]
    while (report := judge(load.measured(seen[-1]))).wait_share >= 0.05 and report.change is not None:
        after = followed(seen[-1], report.change)
        assert after != seen[-1]
        if not after.workers:
            assert all(b >= a for a, b in zip(seen[-1], after, strict=True)), report.advice
        seen.append(after)
        assert len(seen) <= 5, seen
    if load is SERVES_TWO:
        assert report.advice.startswith("no setting helps: reading waits for storage, the network or a lock. ")


def test_a_proposal_that_was_not_taken_up_is_made_again():
    """An interrupt may come before the feed takes up a proposal."""
    tuner = Tuner(bounds(SLOW_DISK), START)
    assert looked(tuner, SLOW_DISK.measured(START)).threads == 8
    assert looked(tuner, MEMORY.measured(START)).threads == 8
    assert len(tuner.history) == 1
