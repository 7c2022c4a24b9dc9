"""The agreement on a feed. Processes are threads here, and real in tests/processes."""

import pytest
from background import PATIENCE_S, spawn
from real_service import joined

from feedline import ProcessError
from feedline.agreement import agree
from feedline.agreement.agree import collective_build

PROCESSES = 3


@pytest.fixture
def build(monkeypatch):
    """`build(process, description)`: one process builds a feed; the counter of feeds is that of each."""
    with joined(PROCESSES) as services:

        def run(process, description, wait_s=PATIENCE_S, error=None):
            monkeypatch.setattr(agree, "coordination", lambda: services[process])
            agree._built.clear()
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
    for one in [build(process, {"rows": 8}, wait_s=0.1) for process in (0, 2)]:
        with pytest.raises(ProcessError, match=r"process 1 did not within 0\.1 s"):
            one.result(PATIENCE_S)


def test_one_that_cannot_build_its_feed_ends_the_wait_of_the_others(build):
    waiting = build(0, {"rows": 8})
    with pytest.raises(OSError, match="no disk"):
        build(1, {"rows": 8}, error=OSError("no disk"))
    with pytest.raises(ProcessError, match="process 1 could not build it: OSError: no disk"):
        waiting.result(PATIENCE_S)
