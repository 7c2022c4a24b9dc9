"""`feedline train`: the modes agree, the digits are learnt, and a wrong argument is a one-line error."""

import contextlib
import io
import json
from typing import get_args

import numpy as np
import programs
import pytest
from launched import FEEDLINE, launched

from feedline._src.tools.main import main
from feedline._src.trainer.modes import Mode

DEFAULT = "jit_multi"
DEVICES = {"jit_single": 1, DEFAULT: 4, "pmap": 8}
COUNTED = ["mode", "devices", "processes", "steps", "rows", "epochs"]
MEASURED = ["final_loss", "test_accuracy", "rows_per_s", "wait_share", "state"]


def train(*options):
    command = [*FEEDLINE, "train", "--cpu-devices", "4", *options]
    return programs.run(command, capture_output=True, text=True, timeout=180, check=True)


def trained_here(*options):
    """Runs `feedline train` in this process, on its eight devices. Returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["train", "--json", *options]) == 0
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def results():
    """{mode: what the default run prints}. Only the default mode runs as a command, on four devices."""
    here = {mode: trained_here("--mode", mode) for mode in get_args(Mode) if mode != DEFAULT}
    return {**here, DEFAULT: json.loads(train("--json").stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", get_args(Mode))
def test_the_default_run_learns_the_digits(results, mode):
    result = results[mode]
    assert list(result) == COUNTED + MEASURED
    assert (result["mode"], result["devices"], result["processes"]) == (mode, DEVICES[mode], 1)
    assert (result["steps"], result["rows"], result["epochs"]) == (440, 440 * 128, 40)
    assert result["test_accuracy"] >= 0.96
    assert result["final_loss"] == pytest.approx(results["jit_single"]["final_loss"], rel=1e-4)
    assert result["state"] == results["jit_single"]["state"]
    assert result["rows_per_s"] > 0
    assert 0 <= result["wait_share"] <= 1


@pytest.mark.slow
def test_two_processes_reach_the_losses_of_one(tmp_path):
    alone = trained_here("--epochs", "2")
    told = launched(*FEEDLINE, "train", "--epochs", "2", "--json", "--checkpoint-dir", str(tmp_path))
    assert told.stderr.count("none yet, training begins") == 1
    printed = [line for line in told.stdout.splitlines() if "{" in line]
    assert len(printed) == 1
    together = json.loads(printed[0].removeprefix("[0] "))
    assert (together["processes"], together["devices"]) == (2, 4)
    assert together["final_loss"] == pytest.approx(alone["final_loss"], rel=1e-4)
    assert together["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=1.5 / 360)
    assert together["state"] == alone["state"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["npz", "directory"])
def test_own_data(form, tmp_path, capsys):
    random = np.random.default_rng(0)
    label = random.integers(3, size=200)
    rows = {"image": (label[:, None, None] + random.random((200, 2, 2))).astype(np.float32), "label": label}
    path = tmp_path / ("own.npz" if form == "npz" else "own")
    if form == "npz":
        np.savez(path, **rows)
    else:
        path.mkdir()
        for name, leaf in rows.items():
            np.save(path / f"{name}.npy", leaf)
    assert main(["train", "--data", str(path), "--batch-size", "32", "--epochs", "30", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["state"]["fingerprint"]["rows"] == 160
    assert result["test_accuracy"] > 0.8
    assert (
        main(["train", "--data", str(path), "--test-data", str(path), "--batch-size", "32", "--steps", "3"]) == 0
    )
    assert "of 200 rows)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch-size", "-8"], "--batch-size must be at least 1, got -8"),
        (["--steps", "3", "--epochs", "2"], "got --steps 3 and --epochs 2; leave one out"),
        (["--seed", "-1"], "--seed must be at least 0 and below 2^32, got -1"),
        (["--test-data", "x.npz"], "--test-data needs a path as --data, got --data digits; leave out --test-data"),
        (["--data", "nowhere.npz"], "there is no file nowhere.npz; check the path"),
        (["--batch-size", "5000"], "1,437 rows cannot fill one of 5,000; use a batch size of at most 1,432"),
        (["--batch-size", "100"], "must be a multiple of the 8 shards"),
        (["--cpu-devices", "2"], "--cpu-devices must be set before jax is imported"),
    ],
)
def test_a_wrong_argument_is_a_one_line_error(options, told, capsys):
    assert main(["train", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("feedline: ")
