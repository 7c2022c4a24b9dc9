"""The claims about feedline itself: each script runs with small sizes and saves results; no figure is judged."""

import json
import runpy
import sys
from pathlib import Path

import programs
import pytest

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


@pytest.mark.slow
def test_feeds_beside_both_limits(run):
    small = ["--gib", 0.01, "--rounds", 2, "--seconds", 0.02]
    found = run("feed", "--row-bytes", 256, 3072, "--batch-mb", 0.2, *small)
    assert [each["row_bytes"] for each in found] == [256, 3072]
    for each in found:
        assert set(each["entrants"]) == {"memory → 8", "memory → 1", "mapped → 8", "mapped → 1", "limit", "gather"}
        assert each["entrants"]["limit"]["of_limit"] == each["entrants"]["gather"]["of_gather"] == 1
        assert all(len(told["samples"]) == 2 and told["median"] > 0 for told in each["entrants"].values())


@pytest.mark.slow
def test_order(run):
    found = run("order", "--repeats", 1)
    assert {(each["shuffle"], each["threads"]) for each in found} == {
        (shuffle, threads) for shuffle in ("full", "blocked") for threads in (1, 2)
    }
    assert all(each["median_cpu_ns"] > 0 for each in found)


def test_place(run):
    found = run("place", "--batch-mb", 0.1, "--repeats", 8)
    assert found["taking"]["take_s"] > 0
    assert {(each["leaves"], each["devices"]) for each in found["placing"]} == {
        (leaves, devices) for leaves in (1, 10, 100) for devices in (1, 8)
    }


def test_overlap(run):
    found = run("overlap", "--step-ms", 2, "--steps", 4)
    assert [depth["prefetch"] for depth in found["depths"]] == [0, 1, 2, 3]
    assert found["depths"][0]["step_s"] > 2e-3  # nothing overlaps there, and the load alone takes that


def test_resume(run):
    assert [each["position"] for each in run("resume", "--repeats", 3)] == [0, 10**6, 10**12]


def test_the_training_thread(run):
    found = run("thread", "--gib", 0.05, "--rounds", 1, "--steps", 3)
    assert [each["batch_kb"] for each in found] == [256, 1024, 4096, 16_384]
    assert all(min(each["next_us"], each["release_us"]) > 0 for each in found)


def test_memory(run):
    found = run("memory", "--batches", 60)
    assert [each["transform"] for each in found] == [False, True]
    assert all(each["slabs_at_the_end"] >= each["slabs_after_20"] > 0 for each in found)


@pytest.mark.slow
def test_a_script_runs_from_any_folder_on_eight_devices(tmp_path):
    command = [sys.executable, CLAIMS / "place.py", "--batch-mb", "0.1", "--repeats", "2", "--out", "place.json"]
    done = programs.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "place.json").read_text())["results"]["taking"]["devices"] == 8
