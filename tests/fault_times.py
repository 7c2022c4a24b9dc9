"""How long a fault took until the user learned of it, for the tables of docs/faults.md."""

import json
import os

import pytest

TIMES = "FEEDLINE_FAULT_TIMES"
"""The variable that names the file to which `measured` writes. tests/faults/measure_faults.py sets it."""


@pytest.fixture
def measured(request):
    """`measured(fault, seconds)` notes it; `fault` is the first cell of a row."""

    def note(fault, seconds):
        if TIMES in os.environ:
            line = {"fault": fault, "seconds": round(seconds, 2), "test": request.node.nodeid}
            with open(os.environ[TIMES], "a") as file:
                file.write(json.dumps(line) + "\n")

    return note
