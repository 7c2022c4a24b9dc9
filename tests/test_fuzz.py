"""Damaged files and states: a short run of benchmarks/fuzz.py, which can run millions of inputs."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from feedline.sources.arrays import ArraySource

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fuzz.py"


def run_fuzz(folder, *options):
    command = [sys.executable, SCRIPT, "--folder", folder, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def scripts(monkeypatch):
    """The modules of the script."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import fuzz
    import fuzz_inputs

    return fuzz, fuzz_inputs


@pytest.mark.slow
def test_a_few_hundred_inputs_give_no_wrong_rows_bad_errors_crashes_or_hangs(scripts, tmp_path):
    _, inputs = scripts
    done = run_fuzz(tmp_path / "refuting", "--inputs", 60, "--seed", 6954)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{60 * len(inputs.FORMATS)} inputs: none refutes" in done.stdout
    assert not (tmp_path / "refuting").exists()


STAND_IN = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    _, number, _ = json.loads(line)
    if number == 1:
        os.abort()
    if number == 3:
        time.sleep(600)
    print(json.dumps(["right", str(number)]), flush=True)
"""


@pytest.mark.slow
def test_a_crash_and_a_hang_are_of_one_input_and_the_next_ones_go_on(scripts, tmp_path):
    fuzz, _ = scripts
    inputs = [fuzz.Input("npy", number, 0) for number in range(5)]
    found = list(fuzz.outcomes(inputs, [sys.executable, "-c", STAND_IN], tmp_path, limit_s=3))
    assert [given.number for given, _ in found] == [0, 1, 2, 3, 4]
    assert [outcome.kind for _, outcome in found] == ["right", "crash", "right", "hang", "right"]
    assert "exit code -6" in found[1][1].detail


def test_a_comparison_of_reads_finds_what_refutes(scripts):
    fuzz, inputs = scripts
    chance = random.Random(0)
    assert fuzz.compared(ArraySource([inputs.rows()]), chance).kind == "right"
    assert fuzz.compared(ArraySource([{"x": np.zeros(7)}]), chance).kind == "other rows"

    class Half(ArraySource):
        def read(self, rows, out):
            super().read(rows[::2], {name: room[::2] for name, room in out.items()})

    assert fuzz.compared(Half([inputs.rows()]), chance).kind == "not all of the buffer written"
    assert "not all of the buffer written" not in fuzz.EXPECTED
