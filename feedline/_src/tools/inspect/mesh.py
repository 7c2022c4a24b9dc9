"""Conversion of the command line's mesh and spec."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from feedline._src.options import checked_integer

MOST_DEVICES = 4096
"""The CPU client of JAX takes 8 s to make so many devices, and much longer for more."""


def parse_mesh(text: str) -> dict[str, int]:
    """{axis: size} of a mesh such as data=4,model=2.

    Raises:
      ValueError: it is no mesh, or a mesh of too many devices.

    Example:
      >>> parse_mesh("data=4,model=2")
      {'data': 4, 'model': 2}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([^\W\d]\w*)\s*=\s*(\d+)\s*", part)
        if found is None:
            raise ValueError(
                f"--mesh takes axis names and sizes with commas between, as data=4,model=2, got {text!r}"
            )
        if found[1] in axes:
            raise ValueError(f"each axis of --mesh needs a name of its own, got {found[1]} twice in {text!r}")
        axes[found[1]] = checked_integer(f"the size of axis {found[1]} in --mesh", int(found[2]), at_least=1)
    devices = math.prod(axes.values())
    if devices > MOST_DEVICES:
        raise ValueError(
            f"--mesh may have at most {MOST_DEVICES:,} devices, got {devices:,}; make an axis and the batch size "
            "smaller by the same factor, which leaves each process and device the same rows"
        )
    return axes


def parse_spec(text: str, axes: Mapping[str, int]) -> tuple[Any, ...]:
    """The entries of the PartitionSpec of a batch, such as data or data+fsdp,None,model.

    Args:
      text: one entry for each axis of a leaf, the batch first: a mesh axis, several with + between, or None.

    Raises:
      ValueError: it names an axis that the mesh does not have, or names one twice.

    Example:
      >>> parse_spec("data+fsdp,None,model", {"data": 2, "fsdp": 2, "model": 2})
      (('data', 'fsdp'), None, 'model')
    """
    entries: list[Any] = []
    used: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        names = [] if part == "None" else [name.strip() for name in part.split("+")]
        for name in names:
            if name not in axes:
                raise ValueError(
                    f"--spec takes axes of the mesh, which has {', '.join(axes)}, got {name!r} in {text!r}; name "
                    "one of them or None for each axis of a leaf, or give that axis a size in --mesh"
                )
        used += names
        entries.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    twice = sorted({name for name in used if used.count(name) > 1})
    if twice:
        raise ValueError(f"--spec may name each axis of the mesh once, got {', '.join(twice)} twice in {text!r}")
    return tuple(entries)
