"""The checks of what was observed, with values that a CPU does not show, and at their limits."""

import pytest

from feedline._src.tools.doctor.compilations import changed, check_compilations
from feedline._src.tools.doctor.job_checks import (
    check_fetches,
    check_fragmentation,
    check_growth,
    check_lock,
    step_of,
)

STATS = {"bytes_limit": 80 << 30, "bytes_in_use": 40 << 30}


def function(name="step", **values):
    whole = {"name": name, "line": "train.py:7", "calls": 100, "seconds": 10.0, "argument_bytes": 1 << 20}
    return {**whole, "compilations": [], **values}


def move(**values):
    return {"kind": "to host", "what": "float()", "line": "train.py:9", "count": 100, "bytes": 400, **values}


@pytest.mark.parametrize(
    ("stats", "severity"),
    [
        ([{**STATS, "largest_free_block_bytes": 39 << 30}], "ok"),
        (
            [{**STATS, "largest_free_block_bytes": 39 << 30}, {**STATS, "largest_free_block_bytes": 2 << 30}],
            "note",
        ),
        ([None], "unknown"),
        ([], "unknown"),
    ],
)
def test_fragmentation(stats, severity):
    check = check_fragmentation({"growth": {"allocators": stats}})
    assert check.severity == severity
    assert check.finding.startswith("device 1") == (len(stats) == 2)


@pytest.mark.parametrize(
    ("moves", "severity"),
    [
        ([move(seconds=2.0)], "warning"),
        ([move(seconds=0.1)], "note"),
        ([move(seconds=2.0, count=10)], "ok"),  # every tenth step
        ([move(seconds=2.0, kind="to device")], "ok"),
    ],
)
def test_fetches(moves, severity):
    assert check_fetches({"moves": moves}, function()).severity == severity


def test_without_a_loop_nothing_is_said_about_transfers():
    assert check_fetches({"moves": [move(seconds=2.0)]}, None).severity == "unknown"


def test_the_step_is_what_is_called_often_with_many_bytes():
    small, once = function("small", argument_bytes=8), function("init", calls=1, argument_bytes=1 << 40)
    assert step_of({"functions": [small, function(), once]})["name"] == "step"
    assert step_of({"functions": [once]}) is None


@pytest.mark.parametrize(
    ("grown_mib", "steps", "severity"), [(20, 100, "ok"), (90, 100, "warning"), (90, 30, "unknown")]
)
def test_host_memory_varies_a_little(grown_mib, steps, severity):
    host = {"what": "host", "first": 1 << 30, "last": (1 << 30) + (grown_mib << 20), "text": "host: more"}
    growth = {"steps": steps, "growths": [host]}
    assert check_growth({"growth": growth}).severity == severity


def probe(late_share, busy_share, main=False):
    thread = {"name": "reader", "main": main, "busy_share": busy_share, "line": "read.py:3"}
    return {"probe": {"samples": 200, "p90_ms": 5.0, "late_share": late_share, "threads": [thread]}}


@pytest.mark.parametrize(
    ("observed", "severity"),
    [
        (probe(0.8, 0.9), "warning"),
        (probe(0.8, 0.9, main=True), "ok"),  # the training thread itself computes
        (probe(0.02, 0.9), "ok"),  # it computes without the lock
        (probe(0.8, 0.05), "ok"),  # a busy machine
        ({}, "unknown"),
    ],
)
def test_the_lock(observed, severity):
    assert check_lock(observed).severity == severity


def test_one_more_compilation_is_a_note():
    compiled = [{"line": "a", "call": i, "seconds": 1.0, "arguments": {"x": f"float32[{i}]"}} for i in range(4)]
    process = {"compilations": [], "jitted": [], "functions": [function(compilations=compiled[:1])]}
    assert check_compilations(process).severity == "ok"
    process["functions"] = [function(compilations=compiled[:2])]
    assert check_compilations(process).severity == "note"
    process["functions"] = [function(compilations=compiled)]
    check = check_compilations(process)
    assert check.severity == "warning"
    assert "was compiled 3 times more (3.00 s): x: float32[0] → float32[1]" in check.finding


def test_what_changed():
    assert changed({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b: 2 → 3"
    assert changed({"a": "1"}, {"b": "1"}) == "a: 1 → none, b: none → 1"
    many = {str(i): "0" for i in range(5)}
    assert changed(many, dict.fromkeys(many, "1")) == "0: 0 → 1, 1: 0 → 1 and 3 more arguments"
