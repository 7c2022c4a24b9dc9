"""Programs that tests start end with all that they started, and tests start them through one helper."""

import ast
import os
import select
import sys
from pathlib import Path

import pytest
from programs import started

TESTS = Path(__file__).parent
FAMILY = ["sh", "-c", "trap '' HUP INT TERM; echo; sleep 1000 & set -m; sh -c 'sleep 1000 & wait' & wait"]
HOPS = [sys.executable, "-c", "import os\nprint(flush=True)\nwhile True:\n    os.fork() and os._exit(0)"]


@pytest.mark.parametrize("command", [FAMILY, HOPS], ids=["family", "hops"])
@pytest.mark.parametrize("limit_s", [0.1, 1000])
def test_what_a_program_started_ends_with_the_block_and_at_the_limit(command, limit_s):
    reading, writing = os.pipe()
    with open(reading) as output:
        with started(command, limit_s=limit_s, stdout=writing) as program:
            os.close(writing)
            if limit_s < 1:
                program.wait()
            else:
                assert output.readline() == "\n"
        assert select.select([output], [], [], 30)[0]
        assert output.read().strip() == ""  # end of file: no process has the other end of the pipe open


STARTS = {f"subprocess.{name}" for name in ("Popen", "call", "check_call", "check_output", "run")}
SCRIPTS = {"chaos/chaos.py", "faults/measure_faults.py"}
"""Scripts that need no helper: they run by hand, or in a test that ends them with all that they started."""


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_all_tests_start_programs_through_the_helper(path):
    """So no program outlives a failed test or waits for ever, and all programs receive signals."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    found = [f"line {call.lineno}: {ast.unparse(call.func)}" for call in calls if ast.unparse(call.func) in STARTS]
    if path.relative_to(TESTS).as_posix() in SCRIPTS:
        assert found  # else it need not be listed
        return
    assert path.name == "programs.py" or not found, "use `programs.run` or `programs.started`"
