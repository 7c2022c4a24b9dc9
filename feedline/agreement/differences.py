"""In which field the processes differ, and which of them does. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_SLICED = (
    "give every process the whole data, the same: feedline finds the rows of each process itself, so a dataset "
    "must not be sliced per process (dataset[process::processes], ShardByJaxProcess), and random maps need a seed"
)
_CHANGES = {
    "version": "install the same packages everywhere",
    "rows": _SLICED,
    "spec": "give every process files of the same form",
    "data": _SLICED,
    "sharding": "build the mesh from the same devices in the same order everywhere, as jax.make_mesh does",
}
_CHANGE = "give every process the same value; the feeds must also be built in the same order everywhere"
_LONGEST = 100
_ABSENT = "absent"


class Difference(NamedTuple):
    """One process that differs, and the sentence that says in what."""

    process: int
    told: str


def difference(descriptions: Mapping[int, Mapping[str, Any]]) -> Difference | None:
    """The first field, in their order, that is not the same in every process; None if all are.

    What most processes say is taken as right; where as many say one thing as another, what the lowest
    process says.

    Args:
      descriptions: of each process, by its index: JSON values by field. Dicts among them are compared entry
        by entry.

    Example:
      >>> print(difference({0: {"batch_size": 8}, 1: {"batch_size": 8}, 2: {"batch_size": 16}}).told)
      process 2 has batch_size 16, processes 0 and 1 have 8; give every process the same value; the feeds must \
also be built in the same order everywhere
    """
    flat = {process: _flat(description) for process, description in sorted(descriptions.items())}
    fields = list(dict.fromkeys(field for entries in flat.values() for field in entries))
    differing = [field for field in fields if len(_groups(flat, field)) > 1]
    if not differing:
        return None
    field = differing[0]
    (usual, them), (other, those) = _groups(flat, field)[:2]
    told = f"{_named(those)} {field} {_short(other)}, {_named(them)} {_short(usual)}"
    if len(differing) > 1:
        more = ", ".join(differing[1:4]) + (", …" if len(differing) > 4 else "")
        told += f" (and {more} {'differs' if len(differing) == 2 else 'differ'})"
    return Difference(those[0], f"{told}; {_CHANGES.get(field.partition('.')[0], _CHANGE)}")


def _flat(description: Mapping[str, Any]) -> dict[str, str]:
    """Every field as JSON, dicts taken apart: {"order.seed": "0"}."""
    entries = {}
    for field, value in description.items():
        if isinstance(value, Mapping):
            entries.update({f"{field}.{key}": json.dumps(part) for key, part in value.items()})
        else:
            entries[field] = json.dumps(value)
    return entries


def _groups(flat: Mapping[int, Mapping[str, str]], field: str) -> list[tuple[str, list[int]]]:
    """The values of a field and the processes that have each, the most common first, then the lowest process's."""
    groups: dict[str, list[int]] = {}
    for process, entries in flat.items():
        groups.setdefault(entries.get(field, _ABSENT), []).append(process)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def named(processes: list[int]) -> str:
    """ "process 3", "processes 0 and 1", "processes 0, 1, 2 and 5 more"; "" for none."""
    if len(processes) < 2:
        return f"process {processes[0]}" if processes else ""
    shown, rest = (processes[:-1], str(processes[-1])) if len(processes) <= 4 else (processes[:3], None)
    return f"processes {', '.join(map(str, shown))} and {rest or f'{len(processes) - 3} more'}"


def _named(processes: list[int]) -> str:
    return f"{named(processes)} {'has' if len(processes) == 1 else 'have'}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
