"""Finds the process and the field in which the feeds of several processes differ. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from feedline._src.agreement.coordination import process_names

_SLICED = (
    "give every process the whole data, the same: feedline finds the rows of each process itself, so a dataset "
    "must not be sliced per process (dataset[process::processes], ShardByJaxProcess), and random maps need a seed"
)
_FIXES = {
    "version": "install the same packages everywhere",
    "rows": _SLICED,
    "spec": "give every process files of the same form",
    "data": _SLICED,
    "sharding": "build the mesh from the same devices in the same order everywhere, as jax.make_mesh does",
}
_FIX = "give every process the same value; the feeds must also be built in the same order everywhere"
_MAX_CHARACTERS = 100
_ABSENT = "absent"


class Mismatch(NamedTuple):
    """A process that differs, and a message with the field, the values and a fix."""

    process: int
    message: str


def find_mismatch(descriptions: Mapping[int, Mapping[str, Any]]) -> Mismatch | None:
    """The first field, in the order of the fields, that is not the same in every process; None if all are.

    The value of most processes is taken as right; in a tie, the value of the process with the lowest index.

    Args:
      descriptions: for each process index, JSON values by field. Dicts are compared entry by entry.

    Example:
      >>> print(find_mismatch({0: {"batch_size": 8}, 1: {"batch_size": 8}, 2: {"batch_size": 16}}).message)
      process 2 has batch_size 16, processes 0 and 1 have 8; give every process the same value; the feeds must \
also be built in the same order everywhere
    """
    flat = {process: _flat(description) for process, description in sorted(descriptions.items())}
    fields = list(dict.fromkeys(field for entries in flat.values() for field in entries))
    differing = [field for field in fields if len(_groups(flat, field)) > 1]
    if not differing:
        return None
    field = differing[0]
    (usual, majority), (other, minority) = _groups(flat, field)[:2]
    message = f"{_with_verb(minority)} {field} {_short(other)}, {_with_verb(majority)} {_short(usual)}"
    if len(differing) > 1:
        more = ", ".join(differing[1:4]) + (", …" if len(differing) > 4 else "")
        message += f" (and {more} {'differs' if len(differing) == 2 else 'differ'})"
    return Mismatch(minority[0], f"{message}; {_FIXES.get(field.partition('.')[0], _FIX)}")


def _flat(description: Mapping[str, Any]) -> dict[str, str]:
    """Every field as JSON, with dicts flattened: {"order.seed": "0"}."""
    entries = {}
    for field, value in description.items():
        if isinstance(value, Mapping):
            entries.update({f"{field}.{key}": json.dumps(part) for key, part in value.items()})
        else:
            entries[field] = json.dumps(value)
    return entries


def _groups(flat: Mapping[int, Mapping[str, str]], field: str) -> list[tuple[str, list[int]]]:
    """Each value of a field with its processes, the most common value first, then that of the lowest process."""
    groups: dict[str, list[int]] = {}
    for process, entries in flat.items():
        groups.setdefault(entries.get(field, _ABSENT), []).append(process)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _with_verb(processes: list[int]) -> str:
    return f"{process_names(processes)} {'has' if len(processes) == 1 else 'have'}"


def _short(value: str) -> str:
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}…"
