"""What the thread that judges leaves for the training thread, and by which batches it judges."""

import dataclasses
import time

import pytest
from simulated import START, Load, bounds

from feedline._src.listen import tuner as module
from feedline._src.listen.tuner import Tuner

SLOW_DISK = Load(make_s=0.080, place_s=0.001, loop_s=0.010)
LONG_AGO = -1e6


class Accounts:
    """The latest batches with the settings in use; and how often somebody looked at them."""

    def __init__(self, settings=START, at=LONG_AGO, drained=True):
        window, self.how = SLOW_DISK.measured(settings, at)
        self.batches = [batch._replace(drained=drained) for batch in window.batches]
        self.looks = 0

    def latest(self):
        self.looks += 1
        return self.batches

    def circumstances(self):
        return self.how


@pytest.fixture
def tuner(monkeypatch):
    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    return Tuner(bounds(SLOW_DISK), START)


def looked(tuner, accounts):
    tuner.look(accounts, accounts.circumstances)
    return tuner.proposal


def test_a_proposal_stays_until_it_is_taken_up(tuner):
    accounts = Accounts()
    proposal = looked(tuner, accounts)
    assert proposal.threads > START.threads
    assert [looked(tuner, accounts), looked(tuner, accounts)] == [proposal] * 2
    assert accounts.looks == 1
    tuner.changed()
    assert tuner.proposal is None


def test_settings_are_judged_by_batches_that_were_taken_after_the_change(tuner):
    proposal = looked(tuner, Accounts())
    tuner.changed()
    before = Accounts(proposal)
    assert looked(tuner, before) is None
    assert len(tuner.history) == 1  # nothing was judged
    after = Accounts(proposal, at=time.perf_counter())
    after.batches = before.batches + after.batches
    looked(tuner, after)
    assert tuner.history[1].startswith(f"keeps threads 2 → {proposal.threads}, buffer 2 → {proposal.buffer}: ")
    assert len(tuner.window(after.batches).batches) == len(before.batches)


def test_batches_that_were_read_ahead_of_a_change_are_no_reason(tuner):
    accounts = Accounts(drained=False)
    assert looked(tuner, accounts) is None
    assert tuner.history == ()
    assert tuner.window(accounts.batches) is None


def test_a_look_is_taken_now_and_then():
    tuner, accounts = Tuner(bounds(SLOW_DISK), START), Accounts(drained=False)
    for _ in range(100):
        looked(tuner, accounts)
    assert accounts.looks == 1


def test_workers_that_fail_while_somebody_judges_are_given_up_at_the_next_look(tuner):
    accounts = Accounts()
    latest = accounts.latest

    def fail():
        assert tuner.does_without_workers(OSError("no room"))
        return latest()

    accounts.latest = fail
    assert looked(tuner, accounts) is None  # what it would propose is of before
    accounts.latest = latest
    looked(tuner, accounts)
    tuner.changed()
    looked(tuner, accounts)
    assert tuner.history.count("goes back to threads, because workers failed with OSError: no room") == 1


def test_workers_that_the_user_gave_are_not_given_up():
    given = dataclasses.replace(bounds(SLOW_DISK), tunable=frozenset({"buffer"}))
    assert not Tuner(given, START).does_without_workers(OSError("no room"))
