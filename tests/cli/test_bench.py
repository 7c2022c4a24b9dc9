"""`feedline bench feed`: a user's feed is measured, and no figure is judged."""

import json
import sys

import numpy as np
import programs
import pytest

from feedline._src.native.library import implementation

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
