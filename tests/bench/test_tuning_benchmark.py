"""The benchmark of tuning runs, and measures a load with "auto" beside a grid."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tuning.py"


@pytest.mark.slow
def test_it_measures_the_loads_that_were_asked_for(tmp_path):
    out, loads = tmp_path / "tuning.json", {"memory", "GIL-bound decode", "slow transfer"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--loads", *loads, "--json", "--out", out],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert set(found["loads"]) == loads
    for load in found["loads"].values():
        assert load["ratio"] == pytest.approx(load["auto_ms"] / load["best_ms"])
        assert set(load["auto"]) == {"threads", "workers", "buffer", "prefetch"}
        assert len(load["grid_ms"]) >= 2
        assert load["search_steps"] > 0
    assert found["worst"] == max(load["ratio"] for load in found["loads"].values())
