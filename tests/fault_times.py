"""Records how long after a fault the user learned of it, for the tables of docs/faults.md."""

import json
import os

import pytest

TIMES = "FEEDLINE_FAULT_TIMES"
"""The variable that names the file to which `measured` writes. tests/faults/measure_faults.py sets it."""


@pytest.fixture
def measured(request):
    """`measured(fault, seconds)` writes a measurement. `fault` is the first cell of its row in docs/faults.md."""

    def note(fault, seconds):
        if TIMES in os.environ:
            line = {"fault": fault, "seconds": round(seconds, 2), "test": request.node.nodeid}
            with open(os.environ[TIMES], "a") as file:
                file.write(json.dumps(line) + "\n")

    return note
