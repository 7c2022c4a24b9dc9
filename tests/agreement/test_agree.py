"""The agreement on a feed. Processes are threads here, and real in tests/processes."""

import threading

import pytest
from background import PATIENCE_S, arrived, spawn
from real_service import joined

from feedline import ProcessError
from feedline._src.agreement import agree
from feedline._src.agreement.agree import SharedBuild, collective_build

PROCESSES = 3


@pytest.fixture
def build(monkeypatch):
    """`build(process, description)`: one process builds a feed; the counter of feeds is that of each."""
    with joined(PROCESSES) as services:

        def run(process, description, wait_s=PATIENCE_S, error=None):
            monkeypatch.setattr(agree, "coordination", lambda: services[process])
            agree._groups.clear()
            with collective_build(range(PROCESSES), 0.01, wait_s) as collective:
                if error is not None:
                    raise error
                return spawn(lambda: collective.agree(description))

        yield run


def test_processes_that_build_the_same_go_on(build):
    running = [build(process, {"rows": 8}) for process in range(PROCESSES)]
    assert [one.result(PATIENCE_S) for one in running] == [None] * PROCESSES


def test_one_that_builds_another_feed_is_named_to_all(build):
    for one in [build(process, {"rows": 8 + (process == 1)}) for process in range(PROCESSES)]:
        with pytest.raises(ProcessError, match="process 1 has rows 9, processes 0 and 2 have 8"):
            one.result(PATIENCE_S)


def test_one_that_does_not_come_is_named(build):
    for one in [build(process, {"rows": 8}, wait_s=2) for process in (0, 2)]:
        with pytest.raises(ProcessError, match=r"process 1 did not within 2 s"):
            one.result(PATIENCE_S)


def test_one_that_cannot_build_its_feed_ends_the_wait_of_the_others(build):
    waiting = build(0, {"rows": 8})
    with pytest.raises(OSError, match="no disk"):
        build(1, {"rows": 8}, error=OSError("no disk"))
    with pytest.raises(ProcessError, match="process 1 could not build it: OSError: no disk"):
        waiting.result(PATIENCE_S)


def test_a_process_that_comes_late_does_not_wait_for_itself(monkeypatch):
    """Process 0 warns before process 1 comes, and process 1 before process 2 does."""
    warned, told = threading.Semaphore(0), []
    monkeypatch.setattr(agree, "_SLICE_S", 0.1)
    monkeypatch.setattr(agree._log, "warning", lambda text, names: (told.append(names), warned.release()))
    with joined(PROCESSES) as services:
        running = []
        for service in services:
            build = SharedBuild(service, "late", range(PROCESSES), 0.01, PATIENCE_S)
            running.append(spawn(lambda build=build: build.agree({"rows": 8})))
            if service.process < PROCESSES - 1:
                assert warned.acquire(timeout=PATIENCE_S)
        for one in running:
            one.result(PATIENCE_S)
    assert told[:2] == ["processes 1 and 2", "process 2"]  # the last one may wait for the comparison


def test_the_keys_of_a_build_are_deleted_when_all_have_built_the_next_one():
    """Also those of builds that failed in between. What an open feed tells others stays."""
    with joined(2) as services:
        services[0].set("feedline/agree/group/1/latest/0", "of an open feed")
        older = []
        for number in range(1, 6):
            name = f"group/{number}"
            builds = [SharedBuild(service, name, range(2), 30, PATIENCE_S, tuple(older)) for service in services]
            if number in (3, 4):
                builds[0].publish({"message": "no disk"})
                older.append(name)
                continue
            for one in [spawn(lambda build=build: build.agree({"rows": 8})) for build in builds]:
                one.result(PATIENCE_S)
            assert {key.split("/")[3] for key in services[0].dir("feedline/build")} == {str(number)}
            older = [name]
        assert services[1].dir("feedline/agree") == {"feedline/agree/group/1/latest/0": "of an open feed"}


def test_the_keys_of_a_build_inside_another_are_deleted_when_all_have_built_the_next_one(monkeypatch):
    mine = threading.local()

    class OfEachThread:
        def setdefault(self, name, group):
            return mine.groups.setdefault(name, group)

    monkeypatch.setattr(agree, "_groups", OfEachThread())
    monkeypatch.setattr(agree, "coordination", lambda: mine.service)

    def build(inside=lambda: None):
        with collective_build(range(2), 30, PATIENCE_S) as collective:
            inside()
            collective.agree({"rows": 8})

    def build_all(service):
        mine.service, mine.groups = service, {}
        build(inside=build)
        build()

    with joined(2) as services:
        for one in [spawn(lambda service=service: build_all(service)) for service in services]:
            one.result(PATIENCE_S)
        assert {key.split("/")[3] for key in services[0].dir("feedline/build")} == {"3"}


def test_a_process_builds_the_feeds_of_a_group_one_after_the_other(monkeypatch):
    """A process that has come to a build has left the one before: only so can the keys of that one be deleted."""
    entered, leave, order = threading.Event(), threading.Event(), []
    with joined(2) as services:
        monkeypatch.setattr(agree, "coordination", lambda: services[0])

        def builds(name):
            with collective_build(range(2), 1, 1):
                entered.set()
                arrived(leave)
                order.append(name)

        running = [spawn(lambda: builds("first"))]
        arrived(entered)
        entered.clear()
        running.append(spawn(lambda: builds("second")))
        assert not entered.wait(0.1)
        leave.set()
        for one in running:
            one.result(PATIENCE_S)
    assert order == ["first", "second"]
