"""`feedline train --checkpoint-dir`: it resumes bit for bit after a full run, Ctrl-C, kill -9 and a full disk."""

import json
import random
import re
import signal
import subprocess
import sys
import time

import programs
import pytest
from launched import FEEDLINE

from feedline._src.tools.main import main
from feedline._src.trainer.checkpoints import Checkpoints

pytestmark = pytest.mark.slow

SMALL = ["--layers", "1", "--width", "16"]
PATIENCE_S = 120
TEMPORARY = ".orbax-checkpoint-tmp"


def command(*options):
    """`feedline train` on eight devices, as many as this process has."""
    return [*FEEDLINE, "train", "--cpu-devices", "8", *SMALL, *options]


@pytest.fixture
def here(capsys):
    """`here(*options)`: runs `feedline train` in this process, and returns its result and its standard error."""

    def run(*options):
        assert main(["train", "--json", *SMALL, *options]) == 0
        told = capsys.readouterr()
        return json.loads(told.out), told.err

    return run


def saved(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def outcome(result):
    return result["final_loss"], result["test_accuracy"], result["state"]


def test_a_resumed_run_ends_like_an_uninterrupted_one(here, tmp_path, capsys):
    folder = tmp_path / "new" / "run"
    whole, _ = here("--epochs", "3")
    begun, told = here("--epochs", "2", "--checkpoint-dir", str(folder), "--save-every", "8")
    assert f"feedline: checkpoints in {folder}: none yet, training begins\nstep 1 of 22 |" in told
    assert saved(folder) == [8, 16, 22]
    resumed, told = here("--epochs", "3", "--checkpoint-dir", str(folder))
    assert (
        f"feedline: checkpoints in {folder}: step 22 is saved, training goes on from there\nstep 23 of 33 |"
        in told
    )
    assert outcome(resumed) == outcome(whole)
    assert (begun["steps"], resumed["steps"], resumed["state"]["step"]) == (22, 11, 33)
    again, told = here("--epochs", "3", "--checkpoint-dir", str(folder))
    assert f"feedline: checkpoints in {folder}: step 33 is saved, and no step is left to do\n" in told
    assert (again["steps"], again["final_loss"]) == (0, None)
    assert (again["test_accuracy"], again["state"]) == (whole["test_accuracy"], whole["state"])
    assert main(["train", *SMALL, "--epochs", "3", "--checkpoint-dir", str(folder)]) == 0
    assert re.fullmatch(r"test accuracy .* \(.* of 360 rows\), mean loss .*\n", capsys.readouterr().out)


def test_ctrl_c_and_sigterm_save_the_last_step(here, tmp_path):
    folder = ["--checkpoint-dir", str(tmp_path), "--save-every", "1000000000"]
    before = 0
    ways = [(signal.SIGINT, 130, "Ctrl-C", "interrupted"), (signal.SIGTERM, 143, "SIGTERM", "terminated")]
    for number, code, name, ended in ways:
        with programs.started(
            command("--steps", "1000000000", *folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as training:
            assert any(
                line.startswith(f"step {before + 1:,} of 1,000,000,000 | loss ") for line in training.stderr
            )
            training.send_signal(number)
            out, err = training.communicate(timeout=PATIENCE_S)
        step = saved(tmp_path)[-1]
        assert (training.returncode, out) == (code, "")
        assert f"feedline: the loop ends after this step; a second {name} ends the process at once\n" in err
        assert err.endswith(f"feedline: {ended} after step {step:,}, which is saved\n")
        assert step > before
        before = step
    resumed, _ = here("--steps", str(step + 5), *folder)
    assert resumed["steps"] == 5
    assert outcome(resumed) == outcome(here("--steps", str(step + 5))[0])


def test_a_signal_while_the_last_step_is_saved_is_not_lost(tmp_path, capsys, monkeypatch):
    save = Checkpoints.save

    def signalled(self, state):
        save(self, state)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "save", signalled)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--steps", "3", "--checkpoint-dir", str(tmp_path), *SMALL])
    assert ended.value.code == 143
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "feedline: terminated after step 3, which is saved"
    assert "test accuracy" in out  # all processes test together, and others may not know of the signal
    assert saved(tmp_path) == [3]


def test_sigterm_saves_the_last_step_with_a_closed_stderr(tmp_path):
    told = command("--steps", "1000000000", "--checkpoint-dir", str(tmp_path), "--save-every", "1000000000")
    with programs.started(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        assert any(line.startswith("step 1 of 1,000,000,000 | loss ") for line in training.stderr)
        training.stderr.close()  # as `2>&1 | tee log` does, where Ctrl-C ends `tee` first
        training.send_signal(signal.SIGTERM)
        assert training.wait(PATIENCE_S) == 143
    assert len(saved(tmp_path)) == 1


def killed_while_saving(folder, chance):
    """Train, and kill the run at a random moment of a save. Returns where it began, and the saved steps."""
    told = command("--steps", "1000000000", "--checkpoint-dir", str(folder), "--save-every", "1")
    with programs.started(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        begun = next(line for line in training.stderr if "checkpoints in" in line)
        seen, enough, deadline = set(), chance.randrange(2, 6), time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline
            seen |= {path.name for path in folder.glob(f"*{TEMPORARY}")}
            if len(seen) < enough:
                continue
            for _ in range(chance.randrange(2000)):  # each takes some 10 µs: any moment of a save
                list(folder.iterdir())
            training.send_signal(signal.SIGSTOP)
            if list(folder.glob(f"*{TEMPORARY}")):
                break
            training.send_signal(signal.SIGCONT)
        training.kill()
        training.communicate(timeout=PATIENCE_S)
    assert training.returncode == -signal.SIGKILL
    found = re.search(r"step ([\d,]+) is saved", begun)
    return int(found[1].replace(",", "")) if found else 0, saved(folder)


def test_a_run_killed_while_saving_continues_from_the_last_complete_checkpoint(here, tmp_path):
    chance, newest = random.Random(7), 0
    for _ in range(3):
        before, whole = killed_while_saving(tmp_path, chance)
        assert before == newest
        newest = max(whole)
        assert newest > before
    resumed, told = here("--steps", str(newest + 3), "--checkpoint-dir", str(tmp_path))
    assert f"step {newest} is saved, training goes on from there" in told
    assert outcome(resumed) == outcome(here("--steps", str(newest + 3))[0])
    assert not list(tmp_path.glob(f"*{TEMPORARY}"))


def test_a_full_disk_is_an_error_and_no_incomplete_checkpoint_is_used(here, tmp_path):
    folder = ["--checkpoint-dir", str(tmp_path)]
    here("--steps", "2", *folder)

    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); "
    limited += "os.execv(sys.argv[1], sys.argv[1:])"
    failed = programs.run(
        [sys.executable, "-c", limited, *command("--steps", "8", "--save-every", "3", *folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (failed.returncode, failed.stdout) == (1, "")
    assert (  # between lines of Orbax's threads
        "feedline: a checkpoint could not be written: File too large. Newest complete checkpoint: step 2; "
        "make room or choose another directory, and start again "
        f"[stage checkpoint, process 0, file {tmp_path}]\n"
    ) in failed.stderr
    assert saved(tmp_path) == [2]
    assert here("--steps", "8", *folder)[0]["steps"] == 6
    assert saved(tmp_path) == [2, 8]
