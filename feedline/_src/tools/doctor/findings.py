"""A finding of the doctor, the exit code, and how findings are shown: as text, problems first, or as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

Severity = Literal["error", "warning", "note", "ok", "unknown"]
_ORDER: tuple[Severity, ...] = get_args(Severity)
_PROBLEMS = _ORDER[:3]
_MAX_LISTED = 3


class Finding(NamedTuple):
    """What one check found, a fix, and why it matters. `made` clears `fix` and `why` of "ok" and "unknown".

    Severity "unknown" means that the check could not be made.
    """

    severity: Severity
    finding: str
    fix: str = ""
    why: str = ""
    name: str = ""


def made(checks: Mapping[str, Callable[[], Finding]]) -> Iterator[Finding]:
    """The findings of {name: check}. If a check raises, its finding is "unknown", and the other checks still run.

    Example:
      >>> next(made({"division": lambda: 1 / 0})).finding
      'the check failed: ZeroDivisionError: division by zero'
    """
    for name, check in checks.items():
        try:
            found = check()
        except Exception as error:  # noqa: BLE001  reported as the finding
            text = " ".join(str(error).split())
            found = Finding("unknown", f"the check failed: {type(error).__name__}: {text}")
        yield (found if found.severity in _PROBLEMS else found._replace(fix="", why=""))._replace(name=name)


def exit_code(findings: Sequence[Finding]) -> int:
    """4 with an error, else 3 with a warning, else 0."""
    severities = {found.severity for found in findings}
    return 4 if "error" in severities else 3 if "warning" in severities else 0


def as_object(findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "ok": exit_code(findings) == 0,
        "checks": [{"name": found.name, **found._asdict()} for found in _sorted(findings)],
        "seconds": round(seconds, 1),
    }


def as_text(findings: Sequence[Finding], seconds: float, width: int) -> str:
    """The text that the command prints: all findings, at most `width` columns wide."""
    texts, others = list[str](), dict[tuple[Severity, str], list[str]]()
    for found in _sorted(findings):
        if found.severity in _PROBLEMS:
            texts.append(_block(found.severity, f"{found.name}: {found.finding}", width))
            texts += [_block("", f"why: {found.why}", width, 14), _block("", f"fix: {found.fix}", width, 14), ""]
        else:
            reason = f": {found.finding}" if found.severity == "unknown" else ""
            others.setdefault((found.severity, reason), []).append(found.name)
    texts += [_block(severity, ", ".join(names) + reason, width) for (severity, reason), names in others.items()]
    counts = Counter(found.severity for found in findings)
    counted = [f"{n} {each}{'s' * (n > 1 and each in _PROBLEMS)}" for each in _ORDER if (n := counts[each])]
    return "\n".join([*texts, f"{', '.join(counted)}; {seconds:.1f} s"])


def _block(label: str, text: str, width: int, indent: int = 9) -> str:
    """A paragraph, with a label in its left margin."""
    first, further = label.ljust(9), " " * indent
    wrapper = textwrap.TextWrapper(width, first, further, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda found: _ORDER.index(found.severity))


def first_three(items: Sequence[str], between: str = ", ") -> str:
    """The first three items of a list, and how many more it has.

    Example:
      >>> first_three(["a", "b", "c", "d", "e"])
      'a, b, c and 2 more'
    """
    return between.join(items[:_MAX_LISTED]) + f" and {len(items) - _MAX_LISTED} more" * (len(items) > _MAX_LISTED)
