"""A few rounds of chaos.py, which can run hundreds: jobs are killed, and resumed on other topologies."""

import json
import sys
from pathlib import Path

import programs
import pytest

SCRIPT = Path(__file__).with_name("chaos.py")


@pytest.mark.nightly
def test_rounds_lose_and_repeat_nothing_and_a_lost_commit_is_found(tmp_path, monkeypatch):
    kinds = ["lanes", "mixture", "records", "stream"]
    command = [sys.executable, SCRIPT, "--folder", tmp_path, "--rounds", "5", "--seed", "6954", "--kinds", *kinds]
    done = programs.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "none lost, none repeated" in done.stdout
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [found["kind"] for found in rounds] == [*kinds, "lanes"]
    assert [(found["processes"], found["commits"] > 5) for found in rounds[::4]] == [(2, True), (4, True)]

    monkeypatch.syspath_prepend(SCRIPT.parent)
    import chaos

    for kind in ("records", "lanes"):
        commits = tmp_path / kind / chaos.COMMITS
        lines = commits.read_text().splitlines(keepends=True)
        commits.write_text("".join(lines[:1] + lines[2:]))
        with pytest.raises(SystemExit, match=f"refuted: commit 1 of {kind} holds"):
            chaos.Job(kind, tmp_path).check()
