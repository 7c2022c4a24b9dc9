"""The benchmark of tuning runs, and measures every load with "auto" beside a grid."""

import json
import sys
from pathlib import Path

import programs
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "claims" / "tuning.py"


@pytest.mark.slow
def test_it_measures_every_load(tmp_path):
    out = tmp_path / "tuning.json"
    done = programs.run(
        [sys.executable, SCRIPT, "--quick", "--out", out], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["loads"]) == {
        "memory", "slow disk", "GIL-bound decode", "GIL-free decode", "slow transfer", "compute-bound",
    }  # fmt: skip
    for load in found["loads"].values():
        assert load["ratio"] == pytest.approx(load["auto_ms"] / load["best_ms"])
        assert set(load["auto"]) == {"threads", "workers", "buffer", "prefetch"}
        assert len(load["grid_ms"]) >= 2
        assert load["search_steps"] > 0
    assert found["worst"] == max(load["ratio"] for load in found["loads"].values())
