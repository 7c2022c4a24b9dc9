"""If processes take different batches of a feed, all of them get an error with names and counts.

These are real runs. tests/agreement/test_in_step.py has every case of the comparison, over a service in one
process.
"""

import re
import sys
from pathlib import Path

import programs
import pytest
from launched import FEEDLINE

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("out_of_step.py")
IN_FEED = r"feedline: the processes are out of step in feed 1 \(feeds are numbered as they are built\): "
AT_STEP = r"the processes are out of step: at step {} of training, the feed of process \d is at epoch {}"


def run(*arguments):
    """Exit code and output of the two processes."""
    command = [*FEEDLINE, "launch", "--processes", "2", "--cpu", "--devices-per-process", "1", "--"]
    command += [sys.executable, str(PROGRAM), *arguments]
    done = programs.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_processes_that_do_the_same_are_in_step():
    code, output = run("in step")
    assert "out of step" not in output
    assert code == 0, output


@pytest.mark.parametrize(
    ("role", "found"),
    [
        (
            "closes",
            r"process (?:0 took 12|1 took 13) batches, and process (?:0 took 12|1 took 13) batches; look for",
        ),
        (
            "one moves",
            r"process 1 went to epoch 1, position 0 after 2 batches, and process 0 took 5 batches without that",
        ),
    ],
)
def test_a_process_that_takes_other_batches_ends_all_with_names_and_counts(role, found):
    code, output = run(role)
    assert code == 1
    assert "reached" not in output
    for process in range(2):
        assert re.search(rf"^\[{process}\].*{IN_FEED[10:]}{found}", output, re.MULTILINE), output


def test_a_leaf_tells_the_step_itself_that_rows_are_of_two_batches():
    code, output = run("in a step")
    assert output.count("mixed True") == 2
    assert code == 0, output


def test_fit_compares_places_while_it_trains():
    code, output = run("fits later")
    assert code == 1
    assert "reached" not in output
    assert re.search(AT_STEP.format(200, r"1, position (156|160)"), output), output


def test_fit_saves_nothing_of_processes_at_different_places(tmp_path):
    code, output = run("saves", str(tmp_path / "checkpoints"))
    assert code == 1
    assert "out of step" in output, output
    assert not [each for each in (tmp_path / "checkpoints").iterdir() if each.name.isdecimal()]
