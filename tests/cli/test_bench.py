"""`feedline bench feed`: a user's feed is measured, and no figure is judged."""

import json
import sys

import jax
import numpy as np
import programs
import pytest

import feedline
from feedline._src.native.library import implementation
from feedline._src.tools.bench.feed import measure_feed
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
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads((folder / "out.json").read_text())
    assert last["machine"]["cores"] >= 1
    assert done.stdout.splitlines()[0].endswith(f"columns by {implementation()}")
    return last


@pytest.mark.parametrize(
    ("size", "options", "rows"), [(16, {}, 16), (16, {"steps_per_call": 4}, 64), ([(0, 8), (2, 16)], {}, 16)]
)
def test_the_limit_counts_the_rows_that_are_placed_together(size, options, rows, monkeypatch):
    monkeypatch.setattr("feedline._src.tools.bench.feed._limit", lambda batch, prefetch, seconds: 1.0)
    with feedline.Feed({"x": np.zeros((64, 3), np.float32)}, size, jax.devices()[0], **options) as feed:
        found = measure_feed(feed, 0)
    assert found["limit_rows_per_s"] == rows
    assert found["rows_per_s"] == pytest.approx(16 * found["batches_per_s"])
    assert found["gb_per_s"] == pytest.approx(12e-9 * found["rows_per_s"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["modes", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["modes", "--seconds", "inf"], "--seconds must be above 0 and below 1e9, got inf"),
        (["modes", "--out", "none/x"], "[Errno 2] No such file or directory: 'none/x'"),
        (["feed", "rows.npy", "--cpu-devices", "-1"], "--cpu-devices must be at least 1, got -1"),
        (
            ["feed", "builtins:print", "--cpu-devices", "0"],
            "builtins:print must build a feedline.Feed and return it, a new one in every call; got None",
        ),
    ],
)
def test_wrong_options(arguments, told, capsys):
    if "--cpu-devices" not in arguments:  # jax is already imported here
        arguments = [*arguments, "--cpu-devices", "0"]
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == f"feedline: {told}\n"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rows.npy", "mine:make_feed"])
def test_a_feed_of_ones_own_is_measured(target, tmp_path):
    (tmp_path / "mine.py").write_text(MAKE_FEED)
    np.save(tmp_path / "rows.npy", np.zeros((640, 3), np.float32))
    found = bench("feed", target, "--seconds", "0.02", "--cpu-devices", "2", folder=tmp_path)["results"]
    assert found["rows_per_s"] == pytest.approx(found["batches_per_s"] * found["batch_size"])
    assert found["limit_rows_per_s"] > 0
    assert all(found[stage] >= 0 for stage in ("read_s", "transform_s", "place_s", "wait_s"))
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"mine.py", "rows.npy", "out.json"}
