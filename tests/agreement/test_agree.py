"""Processes agree on the feed that they build. They are threads here; tests/processes has real ones."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
from background import PATIENCE_S, spawn
from hypothesis import given
from hypothesis import strategies as st
from real_service import joined

from feedline import ProcessError
from feedline._src.agreement import agree
from feedline._src.agreement.agree import CollectiveBuild, collective_build, find_mismatch

PROCESSES = 3


@pytest.fixture
def build(monkeypatch):
    """`build(process, description)` starts the build of a feed on one process. It is feed 1 on each process."""
    with joined(PROCESSES) as services:

        def run(process, description, error=None):
            monkeypatch.setattr(agree, "coordination", lambda: services[process])
            monkeypatch.setattr(agree, "counted", lambda kind, processes: f"feedline/{kind}/1")
            with collective_build(range(PROCESSES), 0.01, PATIENCE_S) as collective:
                if error is not None:
                    raise error
                return spawn(lambda: collective.agree(description))

        yield run


def test_processes_that_build_the_same_go_on(build):
    running = [build(process, {"rows": 8}) for process in range(PROCESSES)]
    assert [one.result(PATIENCE_S) for one in running] == [None] * PROCESSES


def test_of_many_builds_only_the_last_one_stays():
    def build_all(service):
        for number in range(1, 12):
            CollectiveBuild(service, f"many/{number}", range(PROCESSES), 0.01, PATIENCE_S).agree({"rows": 8})

    with joined(PROCESSES) as services:
        for one in [spawn(lambda service=service: build_all(service)) for service in services]:
            one.result(PATIENCE_S)
        assert {key.split("/")[1] for key in services[0].dir("many")} == {"11"}


def test_one_that_builds_another_feed_is_named_to_all(build):
    for one in [build(process, {"rows": 8 + (process == 1)}) for process in range(PROCESSES)]:
        with pytest.raises(ProcessError, match="process 1 has rows 9, processes 0 and 2 have 8"):
            one.result(PATIENCE_S)


def test_one_that_does_not_come_is_named(build, monkeypatch):
    late, seconds = False, itertools.count(0, PATIENCE_S)
    monkeypatch.setattr(agree, "_SLICE_S", 0.1)
    monkeypatch.setattr(agree, "time", SimpleNamespace(monotonic=lambda: next(seconds) if late else 0))
    running = [build(process, {"rows": 8}) for process in (0, 2)]
    while len(agree.coordination().by_process("feedline/feed/1/build/digest")) < 2:
        time.sleep(0.01)
    late = True  # from now on, the clock advances by PATIENCE_S at each reading
    for one in running:
        with pytest.raises(ProcessError, match=r"process 1 did not within 30 s"):
            one.result(PATIENCE_S)


def test_one_that_cannot_build_its_feed_ends_the_wait_of_the_others(build):
    waiting = build(0, {"rows": 8})
    with pytest.raises(OSError, match="no disk"):
        build(1, {"rows": 8}, error=OSError("no disk"))
    with pytest.raises(ProcessError, match="process 1 could not build it: OSError: no disk"):
        waiting.result(PATIENCE_S)


def test_a_process_that_comes_late_does_not_wait_for_itself(monkeypatch):
    """Process 0 warns before process 1 comes, and process 1 warns before process 2 comes."""
    warned, told = threading.Semaphore(0), []
    monkeypatch.setattr(agree, "_SLICE_S", 0.1)
    monkeypatch.setattr(agree._log, "warning", lambda text, names: (told.append(names), warned.release()))
    with joined(PROCESSES) as services:
        running = []
        for service in services:
            build = CollectiveBuild(service, "late/1", range(PROCESSES), 0.01, PATIENCE_S)
            running.append(spawn(lambda build=build: build.agree({"rows": 8})))
            if service.process < PROCESSES - 1:
                assert warned.acquire(timeout=PATIENCE_S)
        for one in running:
            one.result(PATIENCE_S)
    assert told[:2] == ["processes 1 and 2", "process 2"]  # process 2 may warn about the comparison


SAME = {"version": {"jax": "0.10.2"}, "rows": 8, "order": {"seed": 0, "shuffle": True}, "epochs": None}


@given(st.integers(3, 9), st.data())
def test_the_process_that_differs_is_named(processes, data):
    odd = data.draw(st.integers(0, processes - 1))
    field, value = data.draw(st.sampled_from([("rows", 9), ("order", {"seed": 5, "shuffle": True})]))
    said = {process: SAME | ({field: value} if process == odd else {}) for process in range(processes)}
    found = find_mismatch(said)
    assert found.process == odd
    assert found.message.startswith(f"process {odd} has {field}")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rows": 9}, "process 1 has rows 9, process 0 has 8; build the feeds in the same"),
        ({"order": {"seed": 3, "shuffle": True}}, "process 1 has order.seed 3, process 0 has 0; "),
        ({"version": {"jax": "0.11"}}, 'process 1 has version.jax "0.11", process 0 has "0.10.2"; install'),
        ({"version": {}}, 'process 1 has version.jax absent, process 0 has "0.10.2"'),
        ({"epochs": 2, "batch": 1}, "process 1 has epochs 2, process 0 has null (and batch differs); "),
        (dict.fromkeys("abcde", 1), "(and b, c, d, … differ)"),
        ({"rows": "x" * 1000}, "xxx…, process 0"),
    ],
)
def test_the_message_names_the_field_and_both_values(changed, told):
    found = find_mismatch({0: SAME, 1: SAME | changed})
    assert found.process == 1
    assert told in found.message
