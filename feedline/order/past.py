"""What two fingerprints say of the rows before a place of a run: what comes later may be changed in between.

Of a mixture, the stages of weights that have not begun may change; of a feed whose batch size changes, the batch
sizes of later steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feedline.order.schedule import Cursor


def common(
    saved: Mapping[str, Any], own: Mapping[str, Any], step: int, cursor: Cursor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both fingerprints, reduced to what concerns the first `step` batches, which end at the cursor.

    Example:
      >>> one, two = ({"order": {"batch_sizes": [[0, 8], [start, 16]]}} for start in (5, 6))
      >>> [a == b for a, b in (common(one, two, step, Cursor(0, 0)) for step in (5, 6))]
      [True, False]
    """
    both = dict(saved), dict(own)
    if all("batch_sizes" in _order(each) for each in both):
        for each in both:
            each["order"] = {**each["order"], "batch_sizes": _begun(each["order"]["batch_sizes"], step)}
    else:  # a constant batch size may be another one after each restore, so it says nothing of the past
        for each in both:
            if _order(each):
                each["order"] = {key: value for key, value in each["order"].items() if key != "batch_sizes"}
    if cursor.epoch == 0 and all("stages" in _order(each) for each in both):
        for each in both:
            stages = _begun(each["order"]["stages"], cursor.position)
            names = {name for _, counts in stages for name in counts}
            orders = {
                name: order for name, order in dict(each["order"].get("orders", {})).items() if name in names
            }
            each["order"] = {**each["order"], "stages": stages, "orders": orders, "end": None}
            each["rows"] = None  # of an epoch: where it ends follows from the stages
    return both


def _order(fingerprint: Mapping[str, Any]) -> Mapping[str, Any]:
    order = fingerprint.get("order")
    return order if isinstance(order, Mapping) else {}


def _begun(stages: Any, place: int) -> list[Any]:
    """The stages that begin before a place. What is no list of (place, value) is returned as it is."""
    return [stage for stage in stages if stage[0] < place]
