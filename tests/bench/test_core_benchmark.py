"""The benchmark of columns runs, gives every figure, and reads a saved result of the peers benchmark."""

import json
import sys
from pathlib import Path

import programs
import pytest

from feedline._src.native.library import implementation

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "core.py"
PEERS = {
    "standings": {
        "256": {
            "entrants": {
                "gather": {"feedline_over": {"ratio": 0.8}},
                "feedline": {"feedline_over": {"ratio": 1.0}},
                "tf_data_gather": {"feedline_over": {"ratio": 2.5}},
                "numpy": {"feedline_over": {"ratio": 3.5}},
            }
        }
    }
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    (folder / "peers.json").write_text(json.dumps(PEERS))
    parts = ["--parts", "feeds", "thread", "order", "memory", "--peers", folder / "peers.json"]
    return programs.run(
        [sys.executable, SCRIPT, "--quick", "--json", "--out", folder / "core.json", *parts],
        capture_output=True, text=True, timeout=300, check=True, cwd=folder,
    ).stdout, json.loads((folder / "core.json").read_text())  # fmt: skip


def test_every_figure_is_there(ran):
    printed, found = ran
    assert json.loads(printed.splitlines()[-1]) == found
    assert {(each["row_bytes"], each["batch_mb"]) for each in found["feeds"]} == {
        (size, mb) for size in (256, 3072, 12_288, 153_600) for mb in (4, 16)
    }
    for each in found["feeds"]:
        assert set(each["gb_per_s"]) == set(each["core_s_per_gb"]) == {"feed", "take", "gather"}
        assert min(each["feed_of_take"], each["feed_of_gather"], *each["core_s_per_gb"].values()) > 0
    assert [each["batch_kb"] for each in found["thread"]] == [256, 1024, 4096, 16_384]
    assert all(min(each["next_us"], each["release_us"]) > 0 for each in found["thread"])
    assert set(found["order"]) == {implementation(), "NumPy"}
    assert all(set(costs) == {"8192", "65536"} for costs in found["order"].values())
    assert set(found["memory"]) == {
        "batches", "growth_mib_after_20", "growth_mib_after_2000", "new_slabs_after_20",
    }  # fmt: skip
    assert found["peers"] == {"256": {"peer": "tf_data_gather", "feed_of_peer": 2.5}}


def test_the_table_has_a_line_for_each_figure(ran):
    lines = [line for line in ran[0].splitlines() if line.startswith("| ")]
    found = ran[1]
    # for each size of batches two shares; core-seconds; two of the training thread; memory; a peer
    assert len(lines) == 2 + 4 + 1 + 2 + len(found["order"]) + 1 + 1
    assert all(line.count(" | ") == 2 for line in lines)
    assert lines[2].startswith(
        "| feed ÷ np.take, 16 MB: 256 B / 3 KB / 12 KB / 150 KB | 0.90 / 1.10 / 1.10 / 1.15 |"
    )
