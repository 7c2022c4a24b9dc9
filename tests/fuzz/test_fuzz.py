"""Damaged files and states: a short run of fuzz.py, which can run millions of inputs."""

import os
import random
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import programs
import pytest

import feedline
from feedline._src.formats import tfrecord
from feedline._src.sources.arrays import ArraySource

UNWRITTEN = "a second read gives other rows, or does not write all of its buffer"
SCRIPT = Path(__file__).with_name("fuzz.py")


def run_fuzz(folder, *options):
    command = [sys.executable, SCRIPT, "--folder", folder, *map(str, options)]
    return programs.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def scripts(monkeypatch):
    """The modules of the script."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import fuzz
    import fuzz_inputs

    return fuzz, fuzz_inputs


@pytest.mark.slow
def test_some_hundred_inputs_give_no_wrong_rows_bad_errors_crashes_or_hangs(scripts, tmp_path):
    _, inputs = scripts
    done = run_fuzz(tmp_path / "refuting", "--inputs", 10, "--seed", 6954)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{10 * len(inputs.FORMATS)} inputs: none refutes" in done.stdout
    assert not (tmp_path / "refuting").exists()


def stand_in(pipe, folder):
    pipe.send("ready")
    while True:
        given = pipe.recv()
        if given.number == 1:
            os.abort()
        if given.number == 3:
            threading.Event().wait()
        pipe.send(("right", str(given.number)))


@pytest.mark.slow
def test_a_crash_and_a_hang_are_of_one_input_and_the_next_ones_go_on(scripts, tmp_path):
    fuzz, _ = scripts
    # an input of lmdb counts as a hang after 5 s, whatever limit_s is
    inputs = [fuzz.Input("lmdb" if number == 3 else "npy", number, 0) for number in range(5)]
    found = list(fuzz.outcomes(inputs, stand_in, tmp_path, limit_s=120))
    assert [given.number for given, _ in found] == [0, 1, 2, 3, 4]
    assert [outcome.kind for _, outcome in found] == ["right", "crash", "right", "hang", "right"]
    assert "exit code -6" in found[1][1].detail


def test_a_comparison_of_reads_finds_what_refutes(scripts):
    fuzz, inputs = scripts
    import fuzz_checks

    chance, case = random.Random(0), inputs.ALL_CASES["npy records"]
    assert fuzz_checks.compared(ArraySource([case.rows]), chance, case).kind == "right"
    assert fuzz_checks.compared(ArraySource([{"x": np.zeros(7)}]), chance, case).kind == "other rows"

    class Half(ArraySource):
        def read(self, rows, out):
            super().read(rows[::2], {name: room[::2] for name, room in out.items()})

    assert fuzz_checks.compared(Half([case.rows]), chance, case).kind == UNWRITTEN
    assert UNWRITTEN not in fuzz.EXPECTED


def test_a_wrong_record_in_spite_of_a_checksum_refutes(scripts, tmp_path, monkeypatch):
    fuzz, inputs = scripts
    import fuzz_checks

    path = tmp_path / "x.tfrecord"
    inputs.ALL_CASES["tfrecord"].write(path, slice(None))
    chance = random.Random(1)
    assert fuzz_checks.outcome_of("tfrecord", path, chance).kind == "right"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # the checksum of the last record
    assert fuzz_checks.outcome_of("tfrecord", path, chance).kind == "refused"
    monkeypatch.setattr(tfrecord, "data_of", lambda part: part)
    found = fuzz_checks.outcome_of("tfrecord", path, chance)
    assert found.kind == "a wrong row in spite of a checksum"
    assert found.kind not in fuzz.EXPECTED


# --- what it found ---


def test_a_state_of_a_mixture_with_an_epoch_that_is_too_late_is_refused_when_it_is_restored():
    numbers = {"x": np.arange(40, dtype=np.int32)}
    mixture = feedline.Mixture({"a": numbers, "b": numbers}, weights={"a": 1, "b": 1})
    with feedline.Feed(mixture, 8, jax.sharding.SingleDeviceSharding(jax.devices()[0]), prefetch=0) as feed:
        with pytest.raises(ValueError, match=r"epoch 2147483648 is too late for that; seek to an earlier epoch"):
            feed.set_state({**feed.get_state(), "epoch": 1 << 31})
        assert next(feed)["x"].shape == (8,)
