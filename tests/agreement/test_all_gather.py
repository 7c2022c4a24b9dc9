"""The all-gather, and the agreement on a feed. Processes are threads here, and real in tests/processes."""

import pytest
from background import PATIENCE_S, spawn
from processes_as_threads import Service

from feedline import FeedError, ProcessError
from feedline.agreement import agree
from feedline.agreement.agree import collective_build
from feedline.agreement.all_gather import AllGather

PROCESSES = 3


def never():
    return False


def gathers():
    service = Service(PROCESSES)
    return [AllGather(service.of(process), "key", PROCESSES, kept=2) for process in range(PROCESSES)]


def gathered(gathers, name, value, failed=(False,) * PROCESSES):
    """The result on each process, of which each gives the value and its number."""
    running = [
        spawn(lambda one=one, i=i: one(name, [value, i], failed[i], never)) for i, one in enumerate(gathers)
    ]
    return [one.result(PATIENCE_S) for one in running]


def test_every_process_has_the_values_of_all():
    processes = gathers()
    for name in ("0/0", "0/1", "0/2", "0/3"):
        assert gathered(processes, name, name) == [[[name, i] for i in range(PROCESSES)]] * PROCESSES
    # a process that asks again gets the same, though the others went on
    assert processes[1]("0/3", ["0/3", 1], False, never) == [["0/3", i] for i in range(PROCESSES)]
    # the values of names that all processes have left are removed
    names = {key.split("/")[3] for key in processes[0]._service.dir("key/gather")}
    assert names == {"2", "3"}


def test_a_name_at_which_a_process_failed_is_gathered_again():
    processes = gathers()
    gathered(processes, "0/0", "first", failed=[False, True, False])
    assert gathered(processes, "0/0", "again") == [[["again", i] for i in range(PROCESSES)]] * PROCESSES


def test_a_wait_for_other_processes_can_be_given_up():
    with pytest.raises(FeedError, match="the wait for the other processes was given up"):
        gathers()[0]("0/0", 1, False, lambda: True)


@pytest.fixture
def build(monkeypatch):
    """`build(process, service, description)`: one process builds a feed; the counter of feeds is that of each."""

    def run(process, service, description, wait_s=PATIENCE_S):
        monkeypatch.setattr(agree, "coordination", lambda: service.of(process))
        agree._built.clear()
        with collective_build(range(PROCESSES), 0.01, wait_s) as collective:
            return spawn(lambda: collective.agree(description))

    return run


def test_processes_that_build_the_same_go_on(build):
    service = Service(PROCESSES)
    running = [build(process, service, {"rows": 8}) for process in range(PROCESSES)]
    assert [one.result(PATIENCE_S) for one in running] == [None] * PROCESSES


def test_one_that_builds_another_feed_is_named_to_all(build):
    service = Service(PROCESSES)
    for one in [build(process, service, {"rows": 8 + (process == 1)}) for process in range(PROCESSES)]:
        with pytest.raises(ProcessError, match="process 1 has rows 9, processes 0 and 2 have 8"):
            one.result(PATIENCE_S)


def test_one_that_does_not_come_is_named(build):
    service = Service(PROCESSES)
    for one in [build(process, service, {"rows": 8}, wait_s=0.1) for process in (0, 2)]:
        with pytest.raises(ProcessError, match=r"process 1 did not within 0\.1 s"):
            one.result(PATIENCE_S)


def test_one_that_cannot_build_its_feed_ends_the_wait_of_the_others(build, monkeypatch):
    service = Service(PROCESSES)
    waiting = build(0, service, {"rows": 8})
    monkeypatch.setattr(agree, "coordination", lambda: service.of(1))
    agree._built.clear()
    with pytest.raises(OSError, match="no disk"), collective_build(range(PROCESSES), 1, 1):
        raise OSError("no disk")
    with pytest.raises(ProcessError, match="process 1 could not build it: OSError: no disk"):
        waiting.result(PATIENCE_S)
