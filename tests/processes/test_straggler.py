"""Of two processes that train together one reads slowly: the reports of both name it."""

import json
import sys
from pathlib import Path

import pytest
from launched import launched

pytestmark = pytest.mark.slow


def test_the_reports_of_all_processes_name_the_straggler(tmp_path):
    slow = 1
    launched(sys.executable, Path(__file__).with_name("straggling.py"), str(slow), str(tmp_path))
    reports = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    for process, report in enumerate(reports):
        assert report["process"] == process
        assert report["bound"] == "straggler"
        assert (report["straggler"]["process"], report["straggler"]["stage"]) == (slow, "read")
        assert report["straggler"]["stage_s"] > report["straggler"]["others_s"]
    assert "threads" in reports[slow]["change"]["then"]
    assert f"look at process {slow}" in reports[1 - slow]["advice"]
