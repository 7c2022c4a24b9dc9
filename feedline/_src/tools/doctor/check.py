"""The result of one check, and what the results of all checks mean together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

Severity = Literal["ok", "note", "warning", "error", "unknown"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note", "unknown", "ok")
"""The worst first."""
WARNING, ERROR = 3, 4
"""Exit codes. 1 and 2 mean that the doctor itself failed, and that an argument is wrong."""


@dataclasses.dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
      name: in a few words, the same whatever was found.
      severity: "ok"; "note": worth knowing; "warning": costs time or memory; "error": wrong results, or a failure;
        "unknown": could not be checked, and the finding says why.
      finding: what was seen, with the measured values.
      fix: what to change. Empty where there is nothing to change.
      why: why it matters.
      measured: the measured values by name, with units in the names; JSON values.

    Raises:
      ValueError: there is no such severity, or a problem has no fix.

    Example:
      >>> Check("x64", "ok", "jax_enable_x64 is off").severity
      'ok'
    """

    name: str
    severity: Severity
    finding: str
    fix: str = ""
    why: str = ""
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.severity not in get_args(Severity):
            raise ValueError(f"severity must be one of {', '.join(get_args(Severity))}, got {self.severity!r}")
        if self.severity in ("warning", "error") and not (self.fix and self.why):
            raise ValueError(f"the {self.severity} {self.name!r} needs a fix and a reason why it matters")


def unknown(name: str, reason: str) -> Check:
    """A check that could not be made."""
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


def exit_code(checks: Iterable[Check]) -> int:
    """0 without warnings and errors, 3 with a warning, 4 with an error.

    Example:
      >>> exit_code([Check("a", "ok", "fine"), Check("b", "unknown", "no accelerator")])
      0
    """
    severities = {check.severity for check in checks}
    return ERROR if "error" in severities else WARNING if "warning" in severities else 0


def size(count: float) -> str:
    """Bytes in words.

    Example:
      >>> size(3 << 20)
      '3 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"
