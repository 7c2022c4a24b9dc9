"""`feedline bench`: each benchmark runs with small sizes and reports results; no figure is judged."""

import json
import subprocess
import sys
import time

import numpy as np
import programs
import pytest

from feedline._src.native.library import implementation
from feedline._src.tools.main import main

MAKE_FEED = """
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import feedline

def make_feed(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return feedline.Feed({"x": np.zeros((64, 3), np.float32)}, 16, sharding, epochs=1)
"""


def bench(*arguments, folder):
    """The saved object of one run, which equals the last line that it prints."""
    done = programs.run(
        [sys.executable, "-W", "error", "-m", "feedline", "bench", *arguments, "--json", "--out", "out.json"],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads((folder / "out.json").read_text())
    assert last["machine"]["cores"] >= 1
    assert done.stdout.splitlines()[0].endswith(f"columns by {implementation()}")
    return last


SMALL = ["--gib", "0.01", "--rounds", "2", "--seconds", "0.02"]


@pytest.mark.slow
def test_feeds_are_measured_beside_both_limits(tmp_path):
    found = bench(
        "feed", "--row-bytes", "256", "3072", "--batch-mb", "0.2", *SMALL, "--plot", "feed.png", folder=tmp_path
    )["results"]
    assert [each["row_bytes"] for each in found] == [256, 3072]
    for each in found:
        assert set(each["entrants"]) == {"memory → 8", "memory → 1", "mapped → 8", "mapped → 1", "limit", "gather"}
        assert each["entrants"]["limit"]["of_limit"] == each["entrants"]["gather"]["of_gather"] == 1
        assert all(len(told["samples"]) == 2 and told["median"] > 0 for told in each["entrants"].values())
    assert (tmp_path / "feed.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"feed.png", "out.json"}  # no data is left behind


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rows.npy", "mine:make_feed"])
def test_a_feed_of_ones_own_is_measured(target, tmp_path):
    (tmp_path / "mine.py").write_text(MAKE_FEED)
    np.save(tmp_path / "rows.npy", np.zeros((640, 3), np.float32))
    found = bench("feed", target, *SMALL, "--cpu-devices", "2", "--plot", "own.svg", folder=tmp_path)["results"]
    assert found["rows_per_s"] == pytest.approx(found["batches_per_s"] * found["batch_size"])
    assert all(found[stage] >= 0 for stage in ("read_s", "transform_s", "place_s", "wait_s"))
    assert (tmp_path / "own.svg").stat().st_size > 0


@pytest.mark.slow
def test_sigterm_removes_the_generated_rows(tmp_path):
    options = ["--gib", "0.01", "--rounds", "1000000", "--seconds", "0.01", "--folder", str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "feedline",
        "bench",
        "feed",
        "--row-bytes",
        "256",
        "--batch-mb",
        "1",
        *options,
    ]
    with programs.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as benchmark:
        assert any("row B" in line for line in benchmark.stdout)
        while not list(tmp_path.rglob("*")):
            time.sleep(0.01)
        benchmark.terminate()
        _, err = benchmark.communicate(timeout=60)
    assert (benchmark.returncode, err) == (143, "feedline: terminated\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_missing_target_is_named(tmp_path):
    done = programs.run(
        [sys.executable, "-m", "feedline", "bench", "feed", "nothing.npy"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["feedline: there is no file nothing.npy; check the path"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("order", ["--repeats", "1"], marks=pytest.mark.slow),
        ("place", ["--batch-mb", "0.1", "--repeats", "8"]),
        ("overlap", ["--step-ms", "2", "--steps", "4"]),
        ("resume", ["--repeats", "3"]),
    ],
)
def test_the_other_benchmarks_run_and_are_plotted(name, options, tmp_path):
    """In this process, on its eight devices."""
    files = ["--out", str(tmp_path / "out.json"), "--plot", str(tmp_path / f"{name}.png")]
    assert main(["bench", name, *options, "--cpu-devices", "0", *files]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["benchmark"] == name
    assert (tmp_path / f"{name}.png").stat().st_size > 0
    found = result["results"]
    if name == "place":
        assert found["taking"]["take_s"] > 0
        assert {(each["leaves"], each["devices"]) for each in found["placing"]} == {
            (leaves, devices) for leaves in (1, 10, 100) for devices in (1, 8)
        }
    elif name == "order":
        assert {(each["shuffle"], each["threads"]) for each in found} == {
            (shuffle, threads) for shuffle in ("full", "blocked") for threads in (1, 2)
        }
        assert all(each["median_cpu_ns"] > 0 for each in found)
    elif name == "overlap":
        assert [depth["prefetch"] for depth in found["depths"]] == [0, 1, 2, 3]
        assert found["depths"][0]["step_s"] > 2e-3  # nothing overlaps there, and the load alone takes that
    else:
        assert [each["position"] for each in found] == [0, 10**6, 10**12]
