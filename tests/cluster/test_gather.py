"""What processes put together and compare; here each is a thread. tests/multiprocess has real processes."""

import pytest
from background import PATIENCE_S, spawn
from processes_as_threads import Service

from feedline import FeedError, ProcessError
from feedline.cluster import agree
from feedline.cluster.agree import together
from feedline.cluster.gather import Gather

PROCESSES = 3


def never():
    return False


def gathers():
    service = Service(PROCESSES)
    return [Gather(service.of(process), "key", PROCESSES, kept=2) for process in range(PROCESSES)]


def said_by(gathers, place, said, failed=(False,) * PROCESSES):
    """What each is told of a place."""
    running = [
        spawn(lambda one=one, i=i: one(place, [said, i], failed[i], never)) for i, one in enumerate(gathers)
    ]
    return [one.result(PATIENCE_S) for one in running]


def test_all_are_told_what_each_says_of_a_place():
    processes = gathers()
    for place in ("0/0", "0/1", "0/2", "0/3"):
        assert said_by(processes, place, place) == [[[place, i] for i in range(PROCESSES)]] * PROCESSES
    # one that comes again is told what was put together, though the others went on
    assert processes[1]("0/3", ["0/3", 1], False, never) == [["0/3", i] for i in range(PROCESSES)]
    # places that all have left are cleared
    places = {key.split("/")[3] for key in processes[0]._service.dir("key/gather")}
    assert places == {"2", "3"}


def test_a_place_at_which_one_failed_is_said_anew():
    processes = gathers()
    said_by(processes, "0/0", "first", failed=[False, True, False])
    assert said_by(processes, "0/0", "again") == [[["again", i] for i in range(PROCESSES)]] * PROCESSES


def test_a_wait_for_the_others_can_be_given_up():
    with pytest.raises(FeedError, match="the wait for the other processes was given up"):
        gathers()[0]("0/0", 1, False, lambda: True)


@pytest.fixture
def build(monkeypatch):
    """`build(process, service, description)`: one process builds a feed; the counter of feeds is that of each."""

    def run(process, service, description, wait_s=PATIENCE_S):
        monkeypatch.setattr(agree, "coordination", lambda: service.of(process))
        agree._built.clear()
        with together(range(PROCESSES), 0.01, wait_s) as meeting:
            return spawn(lambda: meeting.agree(description))

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
    with pytest.raises(OSError, match="no disk"), together(range(PROCESSES), 1, 1):
        raise OSError("no disk")
    with pytest.raises(ProcessError, match="process 1 could not build it: OSError: no disk"):
        waiting.result(PATIENCE_S)
