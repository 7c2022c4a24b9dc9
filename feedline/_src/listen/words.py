"""Names of stages, and formats of shares, times and counts, for statistics and reports."""

from __future__ import annotations

STAGES = {"read": "reading", "host": "host work", "place": "placing", "compute": "training loop"}
"""The names of stages in sentences. "Host work" is the transform, and casts and copies into host buffers."""


def percent(share: float) -> str:
    """Example: 41 %."""
    return f"{round(share * 100)} %"


def milliseconds(seconds: float) -> str:
    """Three significant digits, without a unit: 0.123, 1.23, 12.3, 123, 1,234."""
    value = round(seconds * 1e3, 3) + 0.0  # adding 0.0 makes -0.0 positive
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def factor(value: float) -> str:
    """At most three significant digits, and no exponent: 0.001, 1.5, 150, over 1000."""
    return "over 1000" if value >= 999.5 else f"{max(value, 0.001):.3g}"


def counted(count: int, thing: str) -> str:
    """Example: 1 batch, 2 batches, 2 epochs, 2 processes."""
    plural = f"{thing}es" if thing.endswith(("tch", "s")) else f"{thing}s"
    return f"{count:,} {thing if count == 1 else plural}"
