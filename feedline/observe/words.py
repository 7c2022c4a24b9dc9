"""How a report names stages, and writes shares and times."""

from __future__ import annotations

STAGES = {"read": "reading", "host": "host work", "place": "placing", "compute": "training loop"}
"""What the stages are called in sentences. Host work is the transform, and casts and copies into host buffers."""


def percent(share: float) -> str:
    """Example: 41 %."""
    return f"{share * 100:.0f} %"


def milliseconds(seconds: float) -> str:
    """Three significant digits, without a unit: 0.123, 1.23, 12.3, 123, 1,234."""
    value = seconds * 1e3
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def times(factor: float) -> str:
    """Example: 0.513 ×."""
    return "over 1000 ×" if factor > 1000 else f"{factor:.3g} ×"
