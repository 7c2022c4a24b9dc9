"""Every example runs in its own process, and prints the expected line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import launched

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {
    "smallest.py": "60 steps on 8 devices, loss 0.000000",
    "existing_iterator.py": "mean 4, state {'given': 5}",
    "grain_dataset.py": "resumed at epoch 0, position 352",
    "row_source.py": "1000 rows of 16 batches, 100 of them with label 7",
    "checkpoints.py": "steps 31 to 60 on one device, same losses: True",
    "preemption.py": "ended after step 60, first weight 0.708344",
    "audit_feed.py": "(64, 8, 8) uint8 on 8 devices",
    "token_packing.py": "160 rows before the resume and 777 after it",
    "mixture.py": "of 6400 rows 75% from the web, 25% from books",
    "crop_and_flip.py": "8 devices hold the images that 1 device held: True",
}


@pytest.mark.parametrize("name", PRINTED)
def test_example(name):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == PRINTED[name]


def test_two_processes():
    done = launched(sys.executable, "-W", "error", EXAMPLES / "two_processes.py")
    printed = [line for line in done.stdout.splitlines() if "steps" in line]  # Gloo's threads print there too
    assert printed == ["[0] 60 steps on 4 devices of 2 processes, 400 of 800 rows read here, loss 0.000000"]


def test_no_example_is_left_out():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTED, "two_processes.py"}
