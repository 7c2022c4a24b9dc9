"""The GPU benchmark: all parts run with small sizes on CPU devices, and a part that fails ends alone."""

import json
import os
import re
import sys
import time
from pathlib import Path

import programs
import pytest
from gpu import gpu

FAILING = """
import os, subprocess, sys, time
from gpu import gpu

def crash(scale):
    return {"good": lambda: {"rate": 2.0}, "bad": lambda: os._exit(7), "later": lambda: {"rate": 3.0}}

def hang(scale):
    def forever():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print("child", child.pid, flush=True)
        time.sleep(100)
    return {"bad": forever}

def good(scale):
    return {"good": lambda: {"rate": 4.0}, "bad": lambda: 1 // 0}

gpu.PARTS = {"crash": crash, "hang": hang, "good": good}
gpu.report = print
gpu._GRACE_S, gpu.__file__ = 40, __file__
if __name__ == "__main__":
    raise SystemExit(gpu.main())
"""
"""gpu.py with parts that fail."""
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(out, *options, script=BENCHMARKS / "gpu" / "gpu.py"):
    """The finished process, and {part: what its file holds}."""
    command = [sys.executable, script, "--out", out, "--cpu-devices", "2", *options]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = os.environ | {"PYTHONPATH": path}
    ran = programs.run(command, env=environ, capture_output=True, text=True, timeout=400)
    return ran, {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


@pytest.mark.slow
def test_the_parts_run_on_cpu_devices(tmp_path):
    ran, parts = run(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("not judged") == 3  # on a CPU
    assert {name: len(found["results"]) for name, found in parts.items()} == {
        "transfer": 2 * 2 * 2, "utilisation": 3 * 2,
    }  # fmt: skip
    for found in parts.values():
        assert (found["errors"], found["skipped"], found["wall_s"] > 0) == ({}, [], True)
        assert {"platform": "cpu", "devices": 2}.items() <= found["machine"].items()
    for each in parts["transfer"]["results"]:
        assert set(each["bytes_per_s"]) == {"pageable", "staged", "pinned"}
        assert all(len(way["samples"]) == 2 and min(way["samples"]) > 0 for way in each["bytes_per_s"].values())
    for each in parts["utilisation"]["results"]:
        assert list(each["au"]) == ["0", "1", "2", "3"]
        assert all(au > 0 for au in each["au"].values())
        assert each["headroom"] > -1


@pytest.mark.slow
def test_a_part_that_crashes_or_hangs_does_not_end_the_others(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    ran, parts = run(tmp_path / "out", "--seconds", "20", script=script)
    assert ran.returncode == 1
    crash, hang, good = (parts[name] for name in ("crash", "hang", "good"))
    assert [each["rate"] for each in crash["results"]] == [2.0]  # kept, although the process died after it
    assert crash["errors"] == {"the part": "its process died with exit code 7"}
    assert [each["case"] for each in good["results"]] == ["good"]
    assert good["errors"] == {"bad": "ZeroDivisionError: integer division or modulo by zero"}
    assert hang["errors"] == {"the part": "it hung or was too slow, and was ended after 60 s"}
    assert "in forever" in ran.stderr  # where it hung
    child = re.search(r"child (\d+)", ran.stdout)[1]
    status = Path("/proc", child, "stat")
    until = time.monotonic() + 60
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "the child process of the part is still there"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("platform", "au", "headroom", "staged", "holds"),
    [  # holds: transfer; a loop that waits for each loss; a loop 8 steps ahead, which was not measured
        ("gpu", 0.995, 0.1, 0.91, [True, True, None]),
        ("gpu", 0.98, 0.1, 0.89, [False, False, None]),
        ("gpu", 0.98, 0.09, 0.91, [True, None, None]),
        ("cpu", 0.995, 0.1, 0.91, [None] * 3),
    ],
)
def test_verdicts(platform, au, headroom, staged, holds):
    sections = {
        "transfer": [{"leaves": 1, "mb": 63.9, "bytes_per_s": {"staged": {"of_limit": staged}}}],
        "utilisation": [{"ahead": 0, "headroom": headroom, "au": {"1": 0.1, "2": au}}],
    }
    parts = {name: {"machine": {"platform": platform}, "results": found} for name, found in sections.items()}
    assert [each[-1] for each in gpu.verdicts(parts)] == holds
