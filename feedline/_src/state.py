"""Makes the state of a feed for a checkpoint, and validates it when it is restored. Pure.

A state holds JSON values: ``{"version", "step", "epoch", "position", "fingerprint"}``. A stream's state also has
``"lanes"``, Grain's state of each lane (see `Lanes`) that this process reads, and ``"writers"``, the process that
saves each. Epoch and position form the cursor after the last batch *delivered*. Only ``"lanes"`` is not the same
on every process. The fingerprint identifies the rows; topology, a constant batch size, epochs and remainder
are not in it, so those may change at a restore.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from feedline._src.errors import OtherDataError
from feedline._src.order.schedule import Cursor

VERSION = 1
_SHOWN = 120
"""The maximum number of characters of a value in an error."""
FIELDS = ("rows", "spec", "data", "order", "format")
"""The fields of a fingerprint: the number of rows, their dtypes and shapes in the source (not JAX's, which depend
on x64), a digest of their contents, their order, and how the source is read (columns, records, a stream)."""


def make(
    step: int,
    cursor: Cursor,
    fingerprint: Mapping[str, Any],
    lanes: Mapping[str, Any] | None,
    writers: Sequence[int] = (),
) -> dict[str, Any]:
    """Make the state after `step` delivered batches, which end at `cursor`. It shares no object with the feed."""
    state = {
        "version": VERSION,
        "step": step,
        "epoch": cursor.epoch,
        "position": cursor.position,
        "fingerprint": copy.deepcopy(dict(fingerprint)),
    }
    return state if not lanes else {**state, "lanes": copy.deepcopy(dict(lanes)), "writers": list(writers)}


def check(state: Any, fingerprint: Mapping[str, Any], allow: Collection[str]) -> tuple[int, Cursor]:
    """Validate a state for this feed. Returns its step and cursor.

    Args:
      state: as `make` returned it, perhaps after a round trip through JSON.
      fingerprint: of the feed that restores the state.
      allow: fields of the fingerprint that may differ.

    Raises:
      TypeError: `state` is not a dict.
      ValueError: `state` is not a state, was saved with other data (the message names the field), or its position
        is beyond the data.
    """
    if isinstance(allow, str) or not set(allow) <= set(FIELDS):
        raise ValueError(f"allow must be a collection of fields out of {FIELDS}, got {allow!r}")
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is the dict that feed.get_state() returned, got {type(state).__name__}")
    if "version" not in state:
        raise ValueError(f"a state is what feed.get_state() returned, got a dict with the keys {list(state)}")
    if state["version"] != VERSION:
        raise ValueError(
            f"this feedline reads states of version {VERSION}, got version {state['version']!r}; "
            "restore it with the release that saved it"
        )
    numbers = [_natural(state, name) for name in ("step", "epoch", "position")]
    if not isinstance(state.get("fingerprint"), Mapping):
        raise ValueError("the state has no fingerprint; pass the whole dict that feed.get_state() returned")
    step, cursor = numbers[0], Cursor(numbers[1], numbers[2])
    from feedline._src.order import past

    saved, own = past.common(state["fingerprint"], fingerprint, step, cursor)
    for field in FIELDS:
        if field not in allow and saved.get(field) != own[field]:
            was, now, remedy = saved.get(field), own[field], None
            if field == "order":
                remedy = past.remedy(was, now, cursor)
                was, now = _different(was, now)
            elif field == "data":
                remedy = "Give the feed the same source; if it is a Grain dataset, give its random maps a seed"
            elif field == "spec":
                remedy = "Give the feed a source with the state's shapes and dtypes (feed.spec has JAX's instead)"
            difference = f"its {field!r} is {_short(was)}, this feed's is {_short(now)}"
            raise OtherDataError(difference, remedy, field)
    check_position(cursor.position, fingerprint["rows"], "the state's position")
    return step, cursor


def order_and_position(state: Any) -> tuple[Any, int]:
    """The order and the position of a state that is not validated yet; (None, 0) if it is not in epoch 0."""
    fingerprint = state.get("fingerprint") if isinstance(state, Mapping) else None
    if (
        not isinstance(fingerprint, Mapping)
        or state.get("epoch") != 0
        or not isinstance(state.get("position"), int)
    ):
        return None, 0
    return fingerprint.get("order"), state["position"]


def check_position(position: int, rows: int | None, name: str = "position") -> None:
    """Refuse a position beyond the data. Position `rows`, the end of an epoch, is valid.

    Args:
      rows: the rows in an epoch; None: a stream, whose length is not known.

    Raises:
      ValueError: the position is too large; the message names the largest one.
    """
    if rows is not None and position > rows:
        raise ValueError(
            f"{name} counts the rows that came before it in its epoch, so it is at most {rows}, the end of the "
            f"epoch; got {position}. feed.seek(epoch, position) goes to any position up to that"
        )


def check_lanes(state: Mapping[str, Any], count: int, needed: Collection[str]) -> dict[str, Any] | None:
    """Validate and return Grain's states of a stream's lanes; None at the start of an epoch, or without lanes.

    Args:
      state: accepted by `check`.
      count: the number of all lanes; 0: the state of no stream.
      needed: the lanes that this process reads.

    Raises:
      ValueError: the state is inconsistent, or lacks a lane.
    """
    lanes, position = state.get("lanes"), state["position"]
    if not count:
        return None
    if position and not lanes:
        raise ValueError("the state of a stream must hold its lanes, and this one has none; restore it whole")
    lanes = lanes or {}
    contradiction = _contradiction(lanes, position, count)
    if contradiction:
        raise ValueError(f"{contradiction}; pass what feed.get_state() or feedline.load_lanes returned, unchanged")
    missing = sorted(set(needed) - set(lanes), key=int)
    if missing and position:
        raise ValueError(
            f"the state of a stream must hold every lane that this process reads, and lacks lane {missing[0]} "
            f"({len(missing)} of {len(needed)} are missing): a process that read other lanes saved it. Save with "
            "feedline.save_lanes on every process, and restore what feedline.load_lanes returns"
        )
    return copy.deepcopy(dict(lanes)) if position else None


def _contradiction(lanes: Any, position: int, count: int) -> str | None:
    """Why the states of lanes are inconsistent with the position, as a sentence; None if they are consistent."""
    if not isinstance(lanes, Mapping):
        return f"a state's 'lanes' must be a dict with a state for each lane, got {repr(lanes)[:100]}"
    names = {str(lane) for lane in range(count)}
    for name, lane in lanes.items():
        if name not in names:
            return f"the lanes of this stream are named '0' to '{count - 1}', and the state has a lane {name!r}"
        if lane is None and position:
            return f"at position {position} every lane has begun, and lane {name} has no state"
        if lane is not None and not position:
            return f"at position 0 no lane has begun, and lane {name} has the state {repr(lane)[:100]}"
    if position % count:
        return (
            f"each of {count} lanes gives the same number of items to a batch, so a state's position must be a "
            f"multiple of {count}, and it is {position}"
        )
    return None


def digest(value: Any) -> str:
    """A short digest of JSON values, the same in every process and Python version.

    Example:
      >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
      True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _natural(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"a state's {name!r} must be an integer in [0, 2^63), got {value!r}")
    return value


def _different(one: Any, two: Any) -> tuple[Any, Any]:
    """Both values. If they are dicts that are too long to be shown, only the items that differ."""
    if not (isinstance(one, Mapping) and isinstance(two, Mapping)) or len(repr((one, two))) <= 2 * _SHOWN:
        return one, two
    names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    first, second = ({name: each[name] for name in names if name in each} for each in (one, two))
    return first, second


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:100]}… (digest {digest(value)[:8]})"
