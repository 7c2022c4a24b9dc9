"""Shows the results of the checks: problems first, then what is fine and what could not be checked."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from feedline._src.tools.doctor.check import ORDER, Check, exit_code

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_INDENT = " " * 9
_WIDEST = 120


def as_object(checks: Sequence[Check], seconds: float) -> dict[str, Any]:
    """What --json prints."""
    return {
        "ok": exit_code(checks) == 0,
        "checks": [dataclasses.asdict(check) for check in _sorted(checks)],
        "seconds": round(seconds, 1),
    }


def show(checks: Sequence[Check], seconds: float, console: Console) -> None:
    """Print all results, as wide as the console, at most 120 columns."""
    width = min(console.width, _WIDEST)
    for text in _lines(checks, seconds, width):
        console.print(text, soft_wrap=True)


def _lines(checks: Sequence[Check], seconds: float, width: int) -> Iterator[Text]:
    for check in _sorted(checks):
        if check.severity in _COLOURS:
            yield from _problem(check, width)
            yield Text()
    fine = [check.name for check in checks if check.severity == "ok"]
    if fine:
        yield _block("ok", ", ".join(fine), width, "green")
    for reason, names in _unknown(checks).items():
        yield _block("unknown", f"{', '.join(names)}: {reason}", width, "dim")
    yield Text(f"{_counts(checks)}; {seconds:.1f} s")


def _problem(check: Check, width: int) -> Iterator[Text]:
    yield _block(check.severity, f"{check.name}: {check.finding}", width, _COLOURS[check.severity])
    for label, text in (("why", check.why), ("fix", check.fix)):
        if text:
            yield _block("", f"{label}: {text}", width, "", _INDENT + "     ")


def _block(label: str, text: str, width: int, style: str, indent: str = _INDENT) -> Text:
    """A label in the margin and a paragraph beside it."""
    filled = textwrap.fill(
        text,
        width,
        initial_indent=_INDENT,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return Text.assemble((label.ljust(len(_INDENT)), style), filled[len(_INDENT) :])


def _unknown(checks: Sequence[Check]) -> dict[str, list[str]]:
    """The names of what could not be checked, by the reason."""
    found: dict[str, list[str]] = {}
    for check in checks:
        if check.severity == "unknown":
            found.setdefault(check.finding, []).append(check.name)
    return found


def _counts(checks: Sequence[Check]) -> str:
    """Example: 1 error, 2 warnings, 9 ok, 3 unknown."""
    counts = {severity: sum(check.severity == severity for check in checks) for severity in ORDER}
    counts = {severity: counts[severity] for severity in ("error", "warning", "note", "ok", "unknown")}
    plural = {"error", "warning", "note"}
    return ", ".join(
        f"{count} {severity}{'s' if severity in plural and count != 1 else ''}"
        for severity, count in counts.items()
        if count
    )


def _sorted(checks: Sequence[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: ORDER.index(check.severity))
