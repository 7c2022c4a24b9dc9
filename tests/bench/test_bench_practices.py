"""`feedline bench practices`: each practice is measured on and off, and the compiler sees the difference."""

import json
import sys
from pathlib import Path

import programs
import pytest

from feedline._src.tools.bench import practices
from feedline._src.tools.bench.machine import KILLED
from feedline._src.tools.bench.workload import Workload
from feedline._src.trainer.modes import Practices

TINY = Workload(depth=4, width=32, inputs=16, outputs=4, rows=64)
SHORT = Path(__file__).parent / "short_preset.py"
PAIRS = practices.pairs(TINY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "less"),
    [
        ("donate_state", "off", "on"),
        ("shard_state", "off", "on"),
        ("ship_uint8", "off", "on"),
        ("steps_per_call", "on", "off"),
    ],
)
def test_the_compiler_sees_the_difference_in_memory(name, more, less):
    found = practices.measured(PAIRS[name], 2, 0.01)
    for which in ("on", "off"):
        figures = found[which]
        assert figures["step_ms"] > 0
        assert len(figures["step_ms_samples"]) == 2
        assert figures["peak_bytes"] == figures["compiled_bytes"]["total"]  # CPU devices do not count
    assert found["ratios"] == sorted(found["ratios"])
    assert found[more]["peak_bytes"] > found[less]["peak_bytes"]


def test_every_option_of_the_trainer_is_among_them():
    varied = set()
    for pair in PAIRS.values():
        assert pair.on != pair.off
        for field in vars(Practices()):
            if getattr(pair.on.practices, field) != getattr(pair.off.practices, field):
                varied.add(field)
    assert varied == set(vars(Practices()))


def test_the_practice_is_what_differs():
    differing = {
        name: [f for f in vars(pair.on) if getattr(pair.on, f) != getattr(pair.off, f)]
        for name, pair in PAIRS.items()
    }
    assert {name: fields for name, fields in differing.items() if len(fields) != 1} == {}


def test_a_pair_whose_process_was_killed_is_a_line():
    assert practices.line("donate_state", {"error": KILLED}) == f"donate_state             {KILLED}"


@pytest.mark.slow
def test_the_command_prints_the_table_and_one_object(tmp_path):
    done = programs.run(
        [sys.executable, "-W", "error", SHORT, "bench", "practices", "--seconds", "0.02",
         "--rounds", "1", "--cpu-devices", "2", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["practices"]
    assert list(found) == list(PAIRS)
    for name, figures in found.items():
        assert {"step_ms", "peak_bytes"} <= set(figures["on"]) & set(figures["off"])
        assert any(line.startswith(f"{name} ") for line in done.stdout.splitlines())
    assert list(tmp_path.iterdir()) == []  # no checkpoint is left behind
