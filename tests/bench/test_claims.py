"""Each script of benchmarks/claims runs with small sizes, and saves results. No figure is judged."""

import json
import os
import runpy
import sys
from pathlib import Path

import programs
import pytest

import feedline

CLAIMS = Path(__file__).parents[2] / "benchmarks" / "claims"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a script in this process, on its eight devices. Returns the saved results."""

    def run(name, *options):
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options), "--out", str(tmp_path / "out.json")])
        runpy.run_path(str(CLAIMS / f"{name}.py"), run_name="__main__")
        result = json.loads((tmp_path / "out.json").read_text())
        assert (result["benchmark"], result["machine"]["cores"] >= 1) == (name, True)
        return result["results"]

    return run


def test_core_gives_every_figure(run):
    small = ["--gib", 0.02, "--rounds", 2, "--seconds", 0.02, "--steps", 10]
    found = run("core", "--row-bytes", 256, 3072, "--batch-mb", 0.2, *small)
    assert [each["row_bytes"] for each in found["feeds"]] == [256, 3072]
    for each in found["feeds"]:
        assert set(each["entrants"]) == {"memory → 8", "memory → 1", "mapped → 8", "mapped → 1", "limit", "gather"}
        assert each["entrants"]["limit"]["of_limit"] == each["entrants"]["gather"]["of_gather"] == 1
        assert all(len(told["samples"]) == 2 and told["median"] > 0 for told in each["entrants"].values())
        assert min(each["core_s_per_gb"].values()) > 0
    assert [each["batch_kb"] for each in found["thread"]] == [256, 1024, 4096, 16_384]
    assert all(min(each["next_us"], each["release_us"]) > 0 for each in found["thread"])
    assert len(found["order"]) == 8
    assert min(found["order"].values()) > 0
    assert [each["position"] for each in found["resume"]] == [0, 10**6, 10**12]


def test_overlap(run):
    found = run("overlap", "--step-ms", 2, "--steps", 4)
    assert [depth["prefetch"] for depth in found["depths"]] == [0, 1, 2, 3]
    assert found["depths"][0]["step_s"] > 2e-3  # without prefetch, a step waits for its load of 2 ms


@pytest.mark.slow
def test_one_curve(run):
    found = run("one_curve", "--processes", 1, 2)
    assert min(map(int, found["parts"]["2"])) == 41  # resumed from the checkpoint of step 40; the kill came later
    assert max(map(int, found["parts"]["2"])) == len(found["whole"]) == 80


@pytest.mark.slow
def test_verdict(run):
    found = run("verdict", "--steps", 10)
    assert {"read × 5", "host × 2", "no prefetch", "stalls"} <= {each["planted"] for each in found}
    assert all(each["expected"] for each in found)


@pytest.mark.slow
def test_memory(run):
    found = run("memory", "--batches", 60)
    assert [each["transform"] for each in found] == [False, True]
    assert all(each["slabs_at_the_end"] >= each["slabs_after_20"] > 0 for each in found)


@pytest.mark.slow
def test_core_measures_the_feedline_that_pythonpath_names(tmp_path):
    """core.py also measures other versions, so it imports only public names."""
    (tmp_path / "feedline").symlink_to(Path(feedline.__file__).parent)
    command = [sys.executable, CLAIMS / "core.py", "--parts", "resume", "--rounds", "1", "--gib", "0.01"]
    done = programs.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"of {tmp_path / 'feedline'}" in done.stdout
