"""Killed and resumed on other topologies: a few rounds of benchmarks/chaos.py, which can run hundreds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SEED = "92"  # kills one of two processes, all of two, and one alone; then resumes what the two did on one
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "chaos.py"


def chaos(folder, rounds):
    command = [sys.executable, SCRIPT, "--folder", folder, "--rounds", str(rounds), "--seed", SEED]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.multiprocess
def test_rounds_lose_and_repeat_nothing_and_a_lost_commit_is_found(tmp_path):
    done = chaos(tmp_path, 4)
    assert done.returncode == 0, done.stderr
    assert "none lost, none repeated" in done.stdout
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["processes"], one["batch_size"]) for one in rounds] == [
        ("arrays", 2, 64),
        ("records", 2, 200),
        ("stream", 1, 200),
        ("arrays", 1, 48),
    ]

    commits = tmp_path / "records" / "commits.jsonl"
    lines = commits.read_text().splitlines(keepends=True)
    commits.write_text("".join(lines[:1] + lines[2:]))
    done = chaos(tmp_path, 4)  # goes on after round 4: only compares
    assert done.returncode == 1
    assert done.stderr.startswith("refuted: commit 1 of records holds")
