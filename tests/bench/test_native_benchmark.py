"""The benchmark of the C library runs, and measures every variant in every case."""

import json
import sys
from pathlib import Path

import programs
import pytest

from feedline._src.native.library import library

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "claims" / "native.py"


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="the library was not built")
def test_it_measures_every_variant(tmp_path):
    out = tmp_path / "native.json"
    done = programs.run([sys.executable, SCRIPT, "--quick", "--out", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["machine"]["columns"] == "C"
    assert len(found["order"]) == len(found["gather"]) == 6
    for told in found["gather"].values():
        assert set(told) == {"take", "cached", "streamed", "chosen", "many, C", "many, NumPy"}
        assert min(told.values()) > 0
