"""What the doctor concludes from made-up observations: some that no CPU gives, and some at the limits."""

import pytest

from feedline._src.tools.doctor import job


def function(name="step", **values):
    whole = {"name": name, "line": "train.py:7", "calls": 100, "argument_bytes": 1 << 20, "numpy_bytes": 0}
    return {**whole, "idle_share": 1.0, **values}


def process(share=0.0, kind="fetch", functions=None, **samples):
    line = {"kind": kind, "line": "train.py:9", "text": "float(loss)", "share": share}
    sampled = {"samples": 200, "late_share": 0.0, "threads": [], "lines": [line], **samples}
    return {"functions": [function()] if functions is None else functions, "samples": sampled}


def lines(observed, kind="fetch"):
    return job.lines(observed, job.step_of(observed), kind)


@pytest.mark.parametrize(
    ("kind", "sampled", "share", "idle_share", "severity"),
    [
        ("fetch", "fetch", 0.7, 1.0, "warning"),
        ("fetch", "fetch", 0.7, 0.02, "ok"),  # a loop that prints every 50th loss, while steps are enqueued
        ("fetch", "fetch", 0.04, 1.0, "ok"),
        ("fetch", "place", 0.7, 1.0, "ok"),
        ("place", "place", 0.02, 1.0, "warning"),
        ("place", "place", 0.005, 1.0, "ok"),
        ("place", "place", 0.2, 0.1, "ok"),  # the devices have enough to do
        ("input", "input", 0.2, 1.0, "warning"),
        ("input", "input", 0.01, 1.0, "ok"),
    ],
)
def test_lines_of_the_loop(kind, sampled, share, idle_share, severity):
    found = lines(process(share, sampled, [function(idle_share=idle_share)]), kind)
    assert found.severity == severity
    if severity == "warning":
        assert f"train.py:9 float(loss) ({share:.1%})" in found.finding


def test_the_devices_wait_for_the_largest_of_several_functions():
    functions = [function("gradients", idle_share=0.9), function("update", idle_share=0.0)]
    assert lines(process(0.7, functions=functions)).severity == "warning"
    rare = [function("evaluate", calls=10), function("step", idle_share=0.0)]
    assert lines(process(0.7, functions=rare)).severity == "ok"


@pytest.mark.parametrize("observed", [process(0.7, functions=[]), process(0.7, samples=199)])
def test_without_a_loop_nothing_is_said_about_its_time(observed):
    assert lines(observed).severity == "unknown"


def test_the_step_is_what_is_called_often_with_many_bytes():
    small, once = function("small", argument_bytes=8), function("init", calls=1, argument_bytes=1 << 40)
    assert job.step_of({"functions": [small, function(), once]})["name"] == "step"
    assert job.step_of({"functions": [once]}) is None


@pytest.mark.parametrize(
    ("grown_mib", "steps", "severity"), [(20, 100, "ok"), (90, 100, "warning"), (90, 30, "unknown")]
)
def test_host_memory_varies_a_little(grown_mib, steps, severity):
    host = {"what": "host", "first": 1 << 30, "last": (1 << 30) + (grown_mib << 20), "text": "host: more"}
    assert job.growing_memory(steps, [host]).severity == severity


@pytest.mark.parametrize(
    ("late_share", "busy_share", "severity"),
    [
        (0.8, 0.9, "warning"),
        (0.02, 0.9, "ok"),  # the busy thread computes without the GIL
        (0.8, 0.05, "ok"),  # late because of other programs, or of the training thread itself
    ],
)
def test_the_gil(late_share, busy_share, severity):
    thread = {"name": "reader", "busy_share": busy_share, "line": "read.py:3"}
    found = job.gil(process(late_share=late_share, threads=[thread])["samples"])
    assert found.severity == severity
    assert ("thread 'reader'" in found.finding) == (busy_share > 0.5)
    assert job.gil(None).severity == "unknown"


@pytest.mark.parametrize(
    ("times", "change", "severity"),
    [
        (1, "", "ok"),
        (2, "x: float32[0] → float32[1]", "note"),
        (2, "", "ok"),
        (4, "", "warning"),
        (4, "x", "warning"),
    ],
)
def test_one_more_compilation_is_a_note(times, change, severity):
    found = job.recompilation(
        [{"line": "train.py:3", "name": "f", "times": times, "seconds": 3.0, "change": change}]
    )
    assert found.severity == severity
    if severity != "ok":
        assert found.finding.startswith(f"f at train.py:3: compiled again {times - 1} × (3.00 s)")
        assert change in found.finding
