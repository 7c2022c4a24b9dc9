"""The results of checks: severities, exit codes, text and JSON."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from feedline._src.tools.doctor.check import Check, as_object, attempt, exit_code, show

FINE = Check("x64", "ok", "off")
NOTE = Check("page cache", "note", "too small", "buy more", "slow")
WARNING = Check("shared memory", "warning", "64 MiB " * 30, "remount", "killed " * 30, {"free_bytes": 1 << 26})
ERROR = Check("driver", "error", "too old", "update", "no start")
UNKNOWN = [Check(name, "unknown", "no accelerator") for name in ("link", "bandwidth")]


@pytest.mark.parametrize(
    ("checks", "code"),
    [([FINE], 0), ([FINE, NOTE, *UNKNOWN], 0), ([FINE, WARNING], 3), ([ERROR, WARNING], 4), ([], 0)],
)
def test_exit_code(checks, code):
    assert exit_code(checks) == code


def test_a_check_that_fails_is_unknown():
    found = attempt("disk", lambda: Path("/no/such/file").read_text())
    assert (found.name, found.severity) == ("disk", "unknown")
    assert found.finding.startswith("the check failed: FileNotFoundError")


def test_a_problem_needs_a_fix_and_a_reason():
    for given in (("warning", "found", "", "why"), ("error", "found", "fix", "")):
        with pytest.raises(ValueError, match="needs a fix"):
            Check("name", *given)
    with pytest.raises(ValueError, match="severity must be one of"):
        Check("name", "fatal", "found")


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_text_shows_problems_first_and_fits(width):
    out = io.StringIO()
    show([FINE, *UNKNOWN, NOTE, WARNING, ERROR], 1.25, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= min(width, 120)
    labels = [line[:9].strip() for line in lines if line[:9].strip()]
    assert labels == ["error", "warning", "note", "ok", "unknown", "1 error,"]
    assert "unknown  link, bandwidth: no accelerator" in lines
    assert lines[-1] == "1 error, 1 warning, 1 note, 1 ok, 2 unknown; 1.2 s"
    assert "\x1b" not in out.getvalue()  # no terminal


def test_json():
    found = json.loads(json.dumps(as_object([FINE, WARNING], 2)))
    assert found["ok"] is False
    assert [check["name"] for check in found["checks"]] == ["shared memory", "x64"]
    assert set(found["checks"][0]) == {"name", "severity", "finding", "fix", "why", "measured"}
    assert found["checks"][0]["measured"] == {"free_bytes": 1 << 26}
