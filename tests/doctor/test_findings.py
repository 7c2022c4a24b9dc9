"""What checks found: severities, exit codes, text and JSON."""

import json
from pathlib import Path

import pytest

from feedline._src.tools.doctor.findings import Finding, as_object, as_text, exit_code, made

FINE = Finding("ok", "off", name="affinity")
NOTE = Finding("note", "too small", "buy more", "slow", name="page cache")
WARNING = Finding("warning", "64 MiB " * 30, "remount", "killed " * 30, "shared memory")
ERROR = Finding("error", "too old", "update", "no start", name="driver")
UNKNOWN = [Finding("unknown", "no accelerator", name=name) for name in ("link", "bandwidth")]


@pytest.mark.parametrize(
    ("findings", "code"),
    [([FINE], 0), ([FINE, NOTE, *UNKNOWN], 0), ([FINE, WARNING], 3), ([ERROR, WARNING], 4), ([], 0)],
)
def test_exit_code(findings, code):
    assert exit_code(findings) == code


def test_a_check_that_fails_is_unknown_and_a_fix_is_for_problems():
    found = list(
        made({"disk": lambda: Path("/no/such/file").read_text(), "files": lambda: FINE._replace(fix="more")})
    )
    assert [(each.name, each.severity, each.fix) for each in found] == [
        ("disk", "unknown", ""),
        ("files", "ok", ""),
    ]
    assert found[0].finding.startswith("the check failed: FileNotFoundError")


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_shows_problems_first_and_fits(width):
    lines = as_text([FINE, *UNKNOWN, NOTE, WARNING, ERROR], 1.25, width).splitlines()
    assert max(map(len, lines)) <= width
    labels = [line[:9].strip() for line in lines if line[:9].strip()]
    assert labels == ["error", "warning", "note", "ok", "unknown", "1 error,"]
    assert "unknown  link, bandwidth: no accelerator" in lines
    assert "         fix: buy more" in lines
    assert lines[-1] == "1 error, 1 warning, 1 note, 1 ok, 2 unknown; 1.2 s"


def test_json():
    found = json.loads(json.dumps(as_object([FINE, WARNING], 2)))
    assert found["ok"] is False
    assert [check["name"] for check in found["checks"]] == ["shared memory", "affinity"]
    assert set(found["checks"][0]) == {"name", "severity", "finding", "fix", "why"}
