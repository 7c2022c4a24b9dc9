"""Killed and resumed on other topologies: a few rounds of benchmarks/chaos.py, which can run hundreds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "chaos.py"


def chaos(folder, rounds):
    command = [sys.executable, SCRIPT, "--folder", folder, "--rounds", str(rounds), "--seed", "6954"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_rounds_lose_and_repeat_nothing_and_a_lost_commit_is_found(tmp_path):
    done = chaos(tmp_path, 5)
    assert done.returncode == 0, done.stderr
    assert "none lost, none repeated" in done.stdout
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [found["kind"] for found in rounds] == ["lanes", "arrays", "records", "stream", "lanes"]
    assert [(found["processes"], found["commits"] > 5) for found in rounds[::4]] == [(2, True), (4, True)]

    for kind in ("records", "lanes"):
        commits = tmp_path / kind / "commits.jsonl"
        lines = commits.read_text().splitlines(keepends=True)
        commits.write_text("".join(lines[:1] + lines[2:]))
        done = chaos(tmp_path, 5)  # goes on after round 5: only compares
        assert done.returncode == 1
        assert done.stderr.startswith(f"refuted: commit 1 of {kind} holds")
