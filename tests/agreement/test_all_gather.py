"""The all-gather. Processes are threads here; tests/processes has real ones."""

import time

import pytest
from background import PATIENCE_S, spawn
from real_service import joined

from feedline import FeedError
from feedline._src.agreement.all_gather import AllGather

PROCESSES = 3


def never():
    return False


@pytest.fixture
def gathers():
    with joined(PROCESSES) as services:
        yield [AllGather(service, "key", PROCESSES, kept=2) for service in services]


def gathered(gathers, name, value, failed=(False,) * PROCESSES):
    """The result on each process. Process i contributes [value, i]."""
    running = [
        spawn(lambda one=one, i=i: one(name, [value, i], failed[i], never)) for i, one in enumerate(gathers)
    ]
    return [one.result(PATIENCE_S) for one in running]


def test_every_process_has_the_values_of_all(gathers):
    for name in ("0/0", "0/1", "0/2", "0/3"):
        assert gathered(gathers, name, name) == [[[name, i] for i in range(PROCESSES)]] * PROCESSES
    # a process that asks again gets the same values, although the others do not
    assert gathers[1]("0/3", ["0/3", 1], False, never) == [["0/3", i] for i in range(PROCESSES)]
    # only the values of the last two names are kept
    names = {key.split("/")[3] for key in gathers[0]._service.dir("key/gather")}
    assert names == {"2", "3"}


def test_a_name_at_which_a_process_failed_is_gathered_again(gathers):
    gathered(gathers, "0/0", "first", failed=[False, True, False])
    assert gathered(gathers, "0/0", "again") == [[["again", i] for i in range(PROCESSES)]] * PROCESSES


def test_a_round_that_is_deleted_while_a_process_waits_in_it_is_gathered_all_the_same(gathers):
    """A process that repeats earlier rounds may delete this round as expired."""
    waiting = spawn(lambda: gathers[0]("0/0", ["a", 0], False, never))
    service = gathers[1]._service
    while not service.try_get("key/gather/0/0/0/arrived"):
        time.sleep(1e-3)
    service.delete("key/gather/0/0/0")
    others = [spawn(lambda i=i: gathers[i]("0/0", ["a", i], False, never)) for i in (1, 2)]
    assert [one.result(PATIENCE_S) for one in (waiting, *others)] == [[["a", i] for i in range(PROCESSES)]] * 3


def test_a_wait_for_other_processes_can_be_given_up(gathers):
    with pytest.raises(FeedError, match="the wait for the other processes was given up"):
        gathers[0]("0/0", 1, False, lambda: True)
