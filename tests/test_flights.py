"""examples/flights.py prints the same figures in each run. NumPy confirms the error of the training mean."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import programs
import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent.parent / "examples" / "flights.py"


def printed(folder):
    optimised = {key: value for key, value in os.environ.items() if key != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    command = [sys.executable, "-W", "error", EXAMPLE, folder]
    done = programs.run(command, capture_output=True, text=True, timeout=300, env=optimised)
    assert done.returncode == 0, done.stderr
    return done.stdout


def part_of(folder, part):
    return {path.stem: np.load(path) for path in (folder / part).glob("*.npy")}


def test_the_mlp_beats_the_mean_and_a_linear_model_in_each_run(tmp_path):
    folder = tmp_path / "flights"
    first = printed(folder)
    converted = {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")}
    assert printed(folder) == first
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")} == converted

    assert first.startswith(f"336,776 flights in {folder}, 9,430 left out: no arrival delay is known\n")
    assert "\n262,242 in the training set, 65,104 in the test set\n" in first
    assert "error in minutes on 65,104 flights " in first
    errors = {
        name: (float(square), float(absolute))
        for name, square, absolute in re.findall(r"^(\S.*?) {2,}(\d+\.\d\d) +(\d+\.\d\d)$", first, re.MULTILINE)
    }
    assert list(errors) == ["training mean", "linear model", "MLP with embeddings"]

    train, test = part_of(folder, "train"), part_of(folder, "test")
    of_mean = test["arr_delay"].astype(np.float64) - train["arr_delay"].mean(dtype=np.float64)
    assert errors["training mean"] == pytest.approx(
        (np.sqrt(np.mean(of_mean**2)), np.mean(abs(of_mean))), abs=0.006
    )
    # seen with seeds 0 to 6: square 42.39 to 42.55, absolute 25.33 to 25.54; linear model: 43.50 and 26.49
    square, absolute = errors["MLP with embeddings"]
    assert square < errors["linear model"][0] - 0.5
    assert absolute < errors["linear model"][1] - 0.6
    assert square < errors["training mean"][0] - 2.5
    assert absolute < errors["training mean"][1] - 1.8
