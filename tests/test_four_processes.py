"""Four real processes, launched once: they read the rows of one process, resume, and all end when one fails."""

import json
import re
import sys
from pathlib import Path

import four_processes
import numpy as np
import programs
import pytest
from four_processes import BEFORE, DAMAGED, ORDER, RESUMED_SIZE, ROWS, SIZE, SOURCE

import feedline

pytestmark = pytest.mark.xdist_group("four_processes")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of the four processes saw, and what the launcher wrote about their end."""
    folder = tmp_path_factory.mktemp("seen")
    launch = [
        sys.executable,
        "-m",
        "feedline",
        "launch",
        "--processes",
        "4",
        "--cpu",
        "--devices-per-process",
        "1",
        "--grace-s",
        "1000",
        "--",
    ]
    command = [*launch, sys.executable, "-W", "error", four_processes.__file__, str(folder)]
    done = programs.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    return [json.loads(Path(folder, f"{process}.json").read_text()) for process in range(4)], done.stderr


def put_together(seen, phase):
    """The global batches of a phase, put together from the rows of all processes."""
    batches = []
    for parts in zip(*(each[phase] for each in seen[0]), strict=True):
        placed = sorted(tuple(part) for of_process in parts for part in of_process)
        rows = [row for _, values in placed for row in values]
        assert [start for start, _ in placed] == list(range(0, len(rows), len(rows) // 4))
        batches.append(rows)
    return batches


@pytest.fixture
def alone(sharding):
    with feedline.Feed(SOURCE, SIZE, sharding, order=ORDER, epochs=1) as feed:
        return np.array([batch["y"] for batch in feed])


def test_global_batches_are_those_of_one_process(seen, alone):
    assert sorted(alone.ravel().tolist()) == list(range(ROWS))
    np.testing.assert_array_equal(put_together(seen, "rows") + put_together(seen, "rest"), alone)


def test_a_resume_with_another_batch_size_goes_on_with_the_next_row(seen, alone):
    np.testing.assert_array_equal(put_together(seen, "resumed"), alone[BEFORE:].reshape(-1, RESUMED_SIZE))


def test_a_row_that_one_process_cannot_read_ends_all_and_is_named(seen, alone):
    (place,) = np.argwhere(alone.ravel() == DAMAGED)
    at_fault = place[0] % SIZE * 4 // SIZE
    assert "ValueError: this row is damaged" in seen[1]
    assert re.search(rf"process {at_fault} (of 4 exited with code 1|failed: ValueError: this row)", seen[1])
