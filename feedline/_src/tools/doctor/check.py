"""The result of a check, the exit code, and how results are shown: as text, problems first, or as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:  # a job that is observed loads no rich
    from rich.console import Console
    from rich.text import Text

Severity = Literal["error", "warning", "note", "unknown", "ok"]
_ORDER: tuple[Severity, ...] = get_args(Severity)  # the worst first
WARNING, ERROR = 3, 4
"""Exit codes. 1 and 2 mean that the doctor itself failed, and that an argument is wrong."""
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_INDENT = " " * 9
_MAX_COLUMNS = 120


@dataclasses.dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
      name: a few words, independent of the result.
      severity: "ok"; "note": worth knowing; "warning": costs time or memory; "error": wrong results, or a failure;
        "unknown": could not be checked, and the finding says why.
      finding: what was seen, with the measured values.
      fix: what to change. Empty where there is nothing to change.
      why: why it matters.
      measured: the measured values by name, with units in the names; JSON values.

    Raises:
      ValueError: there is no such severity, or a problem has no fix.
    """

    name: str
    severity: Severity
    finding: str
    fix: str = ""
    why: str = ""
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.severity not in _ORDER:
            raise ValueError(f"severity must be one of {', '.join(_ORDER)}, got {self.severity!r}")
        if self.severity in ("warning", "error") and not (self.fix and self.why):
            raise ValueError(f"the {self.severity} {self.name!r} needs a fix and a reason why it matters")


def judged(name: str, severity: Severity, finding: str, fix: str = "", why: str = "", **measured: Any) -> Check:
    """A `Check`, without fix and reason where nothing is wrong.

    Example:
      >>> judged("open files", "ok", "this process may open 65,536 files", "ulimit -n 65536", soft=65536).fix
      ''
    """
    problem = severity not in ("ok", "unknown")
    return Check(name, severity, finding, fix if problem else "", why if problem else "", measured)


def unknown(name: str, reason: str) -> Check:
    """The result of a check that could not be made."""
    return Check(name, "unknown", reason)


def attempt(name: str, check: Callable[[], Check]) -> Check:
    """The result of `check`, or "unknown" with the exception that it raised: no check ends the doctor.

    Example:
      >>> attempt("division", lambda: 1 / 0).finding
      'the check failed: ZeroDivisionError: division by zero'
    """
    try:
        return check()
    except Exception as error:  # noqa: BLE001  reported as the finding
        return unknown(name, f"the check failed: {type(error).__name__}: {' '.join(str(error).split())}")


def exit_code(checks: Sequence[Check]) -> int:
    """0 without warnings and errors, 3 with a warning, 4 with an error."""
    severities = {check.severity for check in checks}
    return ERROR if "error" in severities else WARNING if "warning" in severities else 0


def as_object(checks: Sequence[Check], seconds: float) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "ok": exit_code(checks) == 0,
        "checks": [dataclasses.asdict(check) for check in _sorted(checks)],
        "seconds": round(seconds, 1),
    }


def show(checks: Sequence[Check], seconds: float, console: Console) -> None:
    """Print all results in the width of the console, at most 120 columns."""
    for text in _lines(checks, seconds, min(console.width, _MAX_COLUMNS)):
        console.print(text, soft_wrap=True)


def _lines(checks: Sequence[Check], seconds: float, width: int) -> Iterator[Text]:
    from rich.text import Text

    for check in _sorted(checks):
        if check.severity in _COLOURS:
            yield _block(check.severity, f"{check.name}: {check.finding}", width, _COLOURS[check.severity])
            for label, text in (("why", check.why), ("fix", check.fix)):
                if text:
                    yield _block("", f"{label}: {text}", width, "", _INDENT + "     ")
            yield Text()
    fine = [check.name for check in checks if check.severity == "ok"]
    if fine:
        yield _block("ok", ", ".join(fine), width, "green")
    unchecked: dict[str, list[str]] = {}  # names by reason
    for check in checks:
        if check.severity == "unknown":
            unchecked.setdefault(check.finding, []).append(check.name)
    for reason, names in unchecked.items():
        yield _block("unknown", f"{', '.join(names)}: {reason}", width, "dim")
    yield Text(f"{_counts(checks)}; {seconds:.1f} s")


def _block(label: str, text: str, width: int, style: str, indent: str = _INDENT) -> Text:
    """A label in the margin and a paragraph beside it."""
    from rich.text import Text

    wrapper = textwrap.TextWrapper(
        width, _INDENT, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return Text.assemble((label.ljust(len(_INDENT)), style), wrapper.fill(text)[len(_INDENT) :])


def _counts(checks: Sequence[Check]) -> str:
    """Example: 1 error, 2 warnings, 9 ok, 3 unknown."""
    counted = []
    for severity in ("error", "warning", "note", "ok", "unknown"):
        count = sum(check.severity == severity for check in checks)
        plural = "s" if severity in _COLOURS and count != 1 else ""
        counted += [f"{count} {severity}{plural}"] * bool(count)
    return ", ".join(counted)


def _sorted(checks: Sequence[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: _ORDER.index(check.severity))
