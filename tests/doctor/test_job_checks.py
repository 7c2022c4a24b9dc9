"""The checks of what was observed, with values that a CPU does not show, and at their limits."""

import pytest

from feedline._src.tools.doctor.job_checks import (
    check_compilations,
    check_fetches,
    check_fragmentation,
    check_gil,
    check_growth,
    check_input,
    check_placing,
    step_of,
)

STATS = {"bytes_limit": 80 << 30, "bytes_in_use": 40 << 30}


def function(name="step", **values):
    whole = {"name": name, "line": "train.py:7", "calls": 100, "argument_bytes": 1 << 20, "numpy_bytes": 0}
    again = {"compiled_again": 0, "compiled_again_s": 0.0, "change": "", "made": 1, "made_again_s": 0.0}
    return {**whole, **again, "dry_share": 1.0, **values}


def process(share=0.0, kind="fetch", profiled=0, functions=None, **samples):
    line = {"kind": kind, "line": "train.py:9", "text": "float(loss)", "share": share, "profiled_steps": profiled}
    sampled = {"samples": 200, "seconds": 1.0, "late_share": 0.0, "profiled_steps": 3, "threads": []}
    return {
        "functions": [function()] if functions is None else functions,
        "operations": [],
        "samples": {**sampled, "lines": [line], **samples},
        "memory": None,
    }


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
    check = check_fragmentation({"memory": {"allocators": stats}})
    assert check.severity == severity
    assert check.finding.startswith("device 1") == (len(stats) == 2)


@pytest.mark.parametrize(
    ("check", "kind", "share", "profiled", "dry_share", "severity"),
    [
        (check_fetches, "fetch", 0.7, 3, 1.0, "warning"),
        (check_fetches, "fetch", 0.7, 0, 0.02, "ok"),  # prints every fiftieth loss, while steps are enqueued
        (check_fetches, "fetch", 0.001, 3, 1.0, "note"),
        (check_fetches, "fetch", 0.001, 0, 1.0, "ok"),
        (check_fetches, "place", 0.7, 3, 1.0, "ok"),
        (check_placing, "place", 0.001, 3, 1.0, "warning"),
        (check_placing, "place", 0.001, 2, 1.0, "ok"),
        (check_placing, "place", 0.2, 3, 0.1, "ok"),  # the devices have enough to do
        (check_input, "input", 0.2, 0, 1.0, "warning"),
        (check_input, "input", 0.01, 0, 1.0, "ok"),
    ],
)
def test_lines_of_the_loop(check, kind, share, profiled, dry_share, severity):
    found = check(process(share, kind, profiled, [function(dry_share=dry_share)]))
    assert found.severity == severity
    if severity in ("note", "warning"):
        assert "train.py:9 float(loss) (" in found.finding


def test_the_devices_wait_for_the_largest_of_several_functions():
    functions = [function("gradients", dry_share=0.9), function("update", dry_share=0.0)]
    assert check_fetches(process(0.7, functions=functions)).severity == "warning"
    rare = [function("evaluate", calls=10), function("step", dry_share=0.0)]
    assert check_fetches(process(0.7, functions=rare)).severity == "ok"


@pytest.mark.parametrize(
    "observed", [process(0.7, functions=[]), process(0.7, samples=3), {**process(), "samples": None}]
)
def test_without_a_loop_nothing_is_said_about_its_time(observed):
    assert check_fetches(observed).severity == "unknown"


def test_numpy_arguments_are_placed_by_each_call():
    given = function(numpy_bytes=3 << 20, called_from="train.py:31")
    found = check_placing(process(functions=[given]))
    assert found.severity == "warning"
    assert found.finding == "train.py:31 passes NumPy arrays to step, 3 MiB in each call"


def test_the_step_is_what_is_called_often_with_many_bytes():
    small, once = function("small", argument_bytes=8), function("init", calls=1, argument_bytes=1 << 40)
    assert step_of({"functions": [small, function(), once]})["name"] == "step"
    assert step_of({"functions": [once]}) is None


@pytest.mark.parametrize(
    ("grown_mib", "steps", "severity"), [(20, 100, "ok"), (90, 100, "warning"), (90, 30, "unknown")]
)
def test_host_memory_varies_a_little(grown_mib, steps, severity):
    host = {"what": "host", "first": 1 << 30, "last": (1 << 30) + (grown_mib << 20), "text": "host: more"}
    assert check_growth({"memory": {"steps": steps, "growths": [host]}}).severity == severity


@pytest.mark.parametrize(
    ("late_share", "busy_share", "severity"),
    [
        (0.8, 0.9, "warning"),
        (0.02, 0.9, "ok"),  # it computes without the GIL
        (0.8, 0.05, "ok"),  # a busy machine, or the training thread itself
    ],
)
def test_the_gil(late_share, busy_share, severity):
    thread = {"name": "reader", "busy_share": busy_share, "line": "read.py:3"}
    assert check_gil(process(late_share=late_share, threads=[thread])).severity == severity


def test_one_more_compilation_is_a_note():
    def check(*functions, operations=()):
        return check_compilations({"functions": functions, "operations": operations})

    assert check(function()).severity == "ok"
    assert check(function(compiled_again=1, compiled_again_s=1.0)).severity == "note"
    often = check(function(compiled_again=3, compiled_again_s=3.0, change="x: float32[0] → float32[1]"))
    assert often.severity == "warning"
    assert "was compiled 3 times more (3.00 s): x: float32[0] → float32[1]" in often.finding
    assert "no argument had changed" in check(function(compiled_again=1)).finding
    assert "makes a new function" in check(function(made=4)).finding
    operation = {"line": "train.py:3", "name": "jit(add)", "count": 4, "seconds": 1.0}
    assert "train.py:3 (jit(add), outside" in check(operations=[operation]).finding
