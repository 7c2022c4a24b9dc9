"""Compares two fingerprints, but only in what determined the rows delivered so far.

The weights of a mixture's later phases may differ, and so may the batch sizes of later steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feedline._src.order.schedule import Cursor


def common(
    saved: Mapping[str, Any], own: Mapping[str, Any], step: int, cursor: Cursor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both fingerprints, reduced to what determines the first `step` batches, which end at the cursor.

    Example:
      >>> one, two = ({"order": {"batch_sizes": [[0, 8], [start, 16]]}} for start in (5, 6))
      >>> [a == b for a, b in (common(one, two, step, Cursor(0, 0)) for step in (5, 6))]
      [True, False]
    """
    both = dict(saved), dict(own)
    if all(_phases(each, "batch_sizes") for each in both):
        for each in both:
            each["order"] = {**each["order"], "batch_sizes": _begun(each["order"]["batch_sizes"], step)}
    else:  # a constant batch size may change at each resume, so it does not describe the past
        for each in both:
            if isinstance(each.get("order"), Mapping):
                each["order"] = {key: value for key, value in each["order"].items() if key != "batch_sizes"}
    if cursor.epoch == 0 and all(_phases(each, "phases") for each in both):
        for each in both:
            order = each["order"]
            phases = _begun(order["phases"], cursor.position)
            orders = {name: order["orders"].get(name) for _, counts in phases for name in counts}
            each["order"] = {**order, "phases": phases, "orders": orders, "end": None}
            each["rows"] = None  # the rows of an epoch depend on later phases, which may change
    return both


def remedy(saved: Any, own: Any, cursor: Cursor) -> str | None:
    """How to resume at the cursor with other weights; None if the orders also differ in anything else.

    Args:
      saved, own: the orders of both fingerprints, as `common` returns them.
    """
    if cursor.epoch or not all(_phases({"order": order}, "phases") for order in (saved, own)):
        return None
    orders = saved["orders"], own["orders"]
    if any(orders[0][name] != orders[1][name] for name in orders[0].keys() & orders[1].keys()):
        return None
    weights = {"phases": None, "orders": None}
    if {**saved, **weights} != {**own, **weights}:
        return None
    return (
        "The weights before the state's position must stay as they were; give the weights after it as a phase, "
        f"Mixture(sources, weights=[(0, old weights), ({cursor.position}, new weights)])"
    )


def phases_of_state(order: Any) -> dict[int, dict[str, Any]]:
    """{start of a phase: its weights} of a mixture, from a fingerprint's order; empty without a mixture."""
    return dict(order["phases"]) if _phases({"order": order}, "phases") else {}


def _phases(fingerprint: Mapping[str, Any], key: str) -> bool:
    """Whether the order of a fingerprint has a valid list of (position or step, value) under a key."""
    order = fingerprint.get("order")
    phases = order.get(key) if isinstance(order, Mapping) else None
    if not isinstance(phases, list | tuple) or not all(isinstance(each, list | tuple) for each in phases):
        return False
    if not all(len(phase) == 2 and isinstance(phase[0], int) for phase in phases):
        return False
    of_weights = isinstance(order, Mapping) and isinstance(order.get("orders"), Mapping)
    return key == "batch_sizes" or (of_weights and all(isinstance(counts, Mapping) for _, counts in phases))


def _begun(phases: Any, end: int) -> list[Any]:
    """The phases or batch sizes that begin before `end`, a position or a step."""
    return [phase for phase in phases if phase[0] < end]
