"""`feedline audit` in real processes: correct feeds pass, and each kind of fault is found and named."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import programs
import pytest

from feedline._src.tools.main import main

HERE = Path(__file__).parent
PATIENCE_S = 100
X = "batch['x']"


def audit(target, *options):
    """The exit code, the object that --json prints, and standard error."""
    command = [sys.executable, "-m", "feedline", "audit", str(target), *options, "--json"]
    done = programs.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=HERE, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def same(told):
    return {(layout["name"], layout["processes"]): layout["same"] for layout in told["layouts"]}


@pytest.mark.slow
def test_a_correct_feed_passes():
    code, told, err = audit("feeds_to_audit:as_it_should_be", "--processes", "2")
    assert (code, told["ok"], told["difference"]) == (0, True, None)
    outcomes = same(told)
    last = f"{len(outcomes)} of {len(outcomes)} layouts done, 'model across processes' on 2 processes"
    assert err.splitlines()[-1] == f"feedline audit: {last}"
    assert [name for name, outcome in outcomes.items() if outcome is None] == [("two workers", 1)]
    for name in ("model across processes", "resumed after kill -9", "resumed, batch size × 2"):
        assert outcomes[name, 2] is True
    assert len({layout["digest"] for layout in told["layouts"] if layout["rows"] == 320}) == 1
    # 20 batches of 16, 6 to an epoch of 100 rows
    once = "each row index comes once per epoch; remainder 'drop' leaves out 16 in all"
    assert f"4 epochs of 100 rows: {once}." in told["covered"]
    assert told["rows_compared"] == sum(layout["rows"] for layout in told["layouts"]) > 3000
    assert any("arrays in memory" in what for what in told["not_covered"])


@pytest.mark.slow
def test_a_file_is_read_by_workers_too_and_compared_with_its_contents(tmp_path, capfd):
    np.save(tmp_path / "rows.npy", np.arange(600).reshape(100, 6))
    assert main(["audit", str(tmp_path / "rows.npy"), "--processes", "1", "--batches", "6"]) == 0
    told = capfd.readouterr().out
    assert [line.split()[-1] for line in told.splitlines() if "two workers" in line] == ["same"]
    assert "72 rows delivered on one device equal the rows of the source at their indices." in told
    assert "Not covered: the values of an epoch's rows after the first 72, and the epoch's end" in told
    assert told.splitlines()[-1].startswith("ok in ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "processes", "layout", "place", "found", "unharmed"),
    [
        ("swapped", 1, "data", (1, 0, X), "; one device holds that row at batch 1, row 1", "permuted devices"),
        ("by_process", 2, "resumed, permuted", (10, 0, X), "differs from the row on one device", "data"),
        ("late_state", 2, "resumed after kill -9", (2, 8, X), "differs from the row on one device", "data"),
        ("unsteady", 1, "one device", (0, 0, X), "of the source, but it has other values", None),
        ("repeating", 1, "one device", (None, None, None), "of the source comes 2 times in epoch 0", "data"),
    ],
)
def test_a_planted_fault_is_found_and_named(target, processes, layout, place, found, unharmed):
    batches = "4" if target == "late_state" else "20"
    code, told, _ = audit(f"feeds_to_audit:{target}", "--processes", str(processes), "--batches", batches)
    assert (code, told["ok"]) == (1, False)
    difference = told["difference"]
    assert difference["layout"].startswith(f"'{layout}' on {processes} process")
    assert (difference["batch"], difference["row"], difference["leaf"]) == place
    assert found in difference["found"]
    assert unharmed is None or same(told)[unharmed, processes] is True


@pytest.mark.slow
def test_a_transform_that_looks_at_other_rows_is_found():
    code, told, _ = audit("feeds_to_audit:centred", "--processes", "1")
    assert (code, told["difference"]["layout"]) == (1, "'four threads a batch' on 1 process")
    assert "row i of its result must depend on row i alone" in told["difference"]["found"]
    (workers,) = (
        each for each in told["not_covered"] if each.startswith("'two workers' on 1 process: TypeError: ")
    )
    assert "cannot be pickled: cannot pickle '_thread.lock' object" in workers


@pytest.mark.slow
def test_a_mixture_of_rows_of_different_lengths_passes():
    code, told, _ = audit("feeds_to_audit:mixed", "--processes", "2", "--batches", "8")
    assert (code, told["ok"], told["difference"]) == (0, True, None)
    assert any("in a mixture each source has its own epochs" in what for what in told["not_covered"])


@pytest.mark.slow
def test_a_stream_lists_what_is_not_covered():
    code, told, _ = audit("feeds_to_audit:stream", "--processes", "1", "--batches", "5")
    assert (code, told["rows"]) == (0, None)
    assert "that each row comes once, since a stream has no row indices" in told["not_covered"]


@pytest.mark.slow
def test_lanes_saved_by_several_processes_continue_on_others():
    """An epoch is 10 batches. The state is saved half way, when some lanes have ended."""
    code, told, _ = audit("feeds_to_audit:lanes", "--processes", "1,2,4", "--batches", "12")
    assert (code, told["ok"], told["difference"]) == (0, True, None)
    outcomes = same(told)
    refused = ("two workers", "batch size × 2", "resumed, batch size × 2")
    assert {name for (name, _), outcome in outcomes.items() if outcome is None} == set(refused)
    for name in ("resumed after kill -9", "resumed, permuted"):
        assert (outcomes[name, 2], outcomes[name, 4]) == (True, True)
    assert told["different_rows"] > 366  # all items, and padding


@pytest.mark.slow
def test_a_process_that_raises_is_named():
    code, told, _ = audit("feeds_to_audit:raises_on_one", "--processes", "2")
    assert code == 1
    assert told == {
        "ok": False,
        "error": "'resumed after kill -9' on 2 processes: ArithmeticError: as it was told to [process 1]",
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--processes", "1,x"], "--processes takes counts separated by commas, as in 1,2,4, got '1,x'"),
        (["--processes", "0"], "got '0'"),
        (["--batch-size", "10"], "--batch-size must be a multiple of the 8 devices"),
        (["--batches", "3"], "--batches must be at least 4, got 3"),
        (["--limit-s", "0"], "--limit-s must be above 0 and below 1e9 seconds, got 0"),
        ([], "there is no file rows.npy"),
    ],
)
def test_wrong_options(options, text, capsys):
    assert main(["audit", "rows.npy", *options]) == 2
    assert text in capsys.readouterr().err


@pytest.fixture
def hanging(tmp_path):
    """`hanging(*options)` starts an audit that hangs. Returns it, and a pipe that ends with its process."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def start(*options):
        command = [sys.executable, "-m", "feedline", "audit", "feeds_to_audit:hangs", "--processes", "1", *options]
        environ = {**os.environ, "FEEDS_TO_AUDIT_PIPE": str(pipe), "TMPDIR": str(tmp_path)}
        started = programs.started(command, cwd=HERE, env=environ, stderr=subprocess.PIPE, text=True)
        auditor = stack.enter_context(started)
        end = stack.enter_context(os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0))
        assert heard(end) == b"here"
        return auditor, end

    with contextlib.ExitStack() as stack:
        yield start


def heard(end):
    """The next bytes of the pipe; b"" once the process at its other end has ended."""
    assert select.select([end], [], [], PATIENCE_S)[0]
    return end.read(4)


@pytest.mark.slow
def test_a_layout_that_hangs_is_ended(hanging):
    auditor, end = hanging("--limit-s", "20")
    _, told = auditor.communicate(timeout=PATIENCE_S)
    assert "'one device' on 1 process must take no more than 20 s" in told
    assert "but process 0 took longer or ended" in told
    assert (auditor.returncode, heard(end)) == (1, b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (signal.SIGINT, 130, "feedline: interrupted\n"),
        (signal.SIGTERM, 143, "feedline: terminated\n"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_no_process_and_no_folder_outlives_the_audit(number, code, told, hanging, tmp_path):
    auditor, end = hanging()
    auditor.send_signal(number)
    _, err = auditor.communicate(timeout=PATIENCE_S)
    assert (auditor.returncode, err) == (code, f"feedline audit: starting 1 process\n{told}")
    assert heard(end) == b""
    if number != signal.SIGKILL:
        assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
