"""Which process reads which rows and columns of a batch, and which device holds which block of each leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

from feedline._src.loader.form import LocalForm
from feedline._src.placement.plan import Columns, LeafPlan, plan_leaf, union_of_rows
from feedline._src.tools.inspect.contents import Contents

_WHOLE = (Fraction(0), Fraction(1))
Span = tuple[int, int]
"""Adjacent indices: the first, and the one after the last."""


class ProcessReads(NamedTuple):
    """The part of a batch that one process supplies.

    Attributes:
      process: its index.
      devices: the numbers of its devices.
      plans: for each leaf of the batch, its rows and columns.
      rows: the rows of which it supplies any leaf.
      local_bytes: the process-local batch as it is placed.
      read_bytes: of its leaves that are cast, cut or transformed on the host, as they are read before.
      cuts: whether it reads whole rows and places only some of their columns.
    """

    process: int
    devices: list[int]
    plans: list[LeafPlan]
    rows: list[Span]
    local_bytes: int
    read_bytes: int
    cuts: bool


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How leaves that are divided in the same way lie on the devices.

    Attributes:
      leaves: the indices of these leaves.
      row_parts: the spans of rows, ascending.
      column_parts: the shares of the further axes, ascending; only those axes that are divided.
      devices: {(row part, column part): the numbers of the devices that hold that block}.
    """

    leaves: list[int]
    row_parts: list[Span]
    column_parts: list[tuple[tuple[Fraction, Fraction], ...]]
    devices: dict[tuple[int, int], list[int]]


def reads_of_process(
    process: int,
    devices: Sequence[Any],
    batch: Sequence[jax.ShapeDtypeStruct],
    names: Sequence[str],
    contents: Contents,
    reads_columns: bool,
) -> ProcessReads:
    """The part of a batch that a process with these devices supplies. No such process need exist.

    Args:
      process: its index.
      devices: of the process.
      batch: the leaves of the global batch, with shardings; `valid` last, if there is one.
      names: of the leaves.
      contents: of the source.
      reads_columns: whether the process may read some columns of a leaf alone.

    Raises:
      ValueError: a sharding cannot divide its leaf.
    """
    spec, out, transformed = contents.spec, contents.out, contents.transformed
    own = frozenset(devices)
    plans = [plan_leaf(leaf.sharding, leaf.shape, own, name) for leaf, name in zip(batch, names, strict=True)]
    of_rows = plans[: len(out.leaves)]  # without `valid`, which is not read
    rows = union_of_rows(of_rows)
    is_cut = not all(plan.whole_columns and len(plan.rows) == len(rows) for plan in of_rows)
    by_leaf = is_cut and reads_columns and not transformed
    read = LocalForm(spec, None, 0, out, of_rows, rows, by_leaf, None, 0).read_shapes()
    placed = [(plan.local_shape, leaf.dtype) for plan, leaf in zip(plans, batch, strict=True)]
    local_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in placed)
    also_read = [
        math.prod(shape) * leaf.dtype.itemsize
        for i, (shape, leaf) in enumerate(zip(read, spec.leaves, strict=True))
        if transformed or (shape, leaf.dtype) != placed[i]
    ]
    cuts = not by_leaf and not all(plan.whole_columns for plan in of_rows)
    numbers = [device.id for device in devices]
    return ProcessReads(process, numbers, plans, spans(rows), local_bytes, sum(also_read), cuts)


def spans(indices: Any) -> list[Span]:
    """Ascending indices as spans of adjacent ones.

    Example:
      >>> spans(np.array([0, 1, 2, 6, 7]))
      [(0, 3), (6, 8)]
    """
    ends = np.flatnonzero(np.diff(indices) != 1)
    starts = indices[np.concatenate([[0], ends + 1])].tolist() if len(indices) else []
    stops = (indices[np.concatenate([ends, [len(indices) - 1]])] + 1).tolist() if len(indices) else []
    return list(zip(starts, stops, strict=True))


def column_spans(columns: Columns, shape: Sequence[int]) -> list[list[Span]]:
    """For each axis after the first, the columns of a plan as spans."""
    return [
        [column.indices(size)[:2]] if isinstance(column, slice) else spans(column)
        for column, size in zip(columns, shape[1:], strict=True)
    ]


def blocks_of(batch: Sequence[jax.ShapeDtypeStruct]) -> list[Blocks]:
    """How the leaves of a batch lie on the devices; leaves that are divided in the same way together."""
    found: dict[Any, list[int]] = {}
    for i, leaf in enumerate(batch):
        found.setdefault(_division(leaf), []).append(i)
    return [_blocks(dict(division), leaves, batch[leaves[0]].shape[0]) for division, leaves in found.items()]


def _division(leaf: jax.ShapeDtypeStruct) -> Any:
    """The share of each axis that each device holds, without undivided axes at the end."""
    division = []
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        shares = [
            (Fraction(start, size), Fraction(stop, size)) if size else _WHOLE
            for (start, stop, _), size in ((i.indices(n), n) for i, n in zip(index, leaf.shape, strict=True))
        ]
        division.append((device.id, shares))
    divided = [axis for axis in range(1, len(leaf.shape)) if any(shares[axis] != _WHOLE for _, shares in division)]
    last = max(divided, default=0)
    return tuple((device, tuple(shares[: last + 1])) for device, shares in sorted(division))


def _blocks(division: dict[int, Any], leaves: list[int], batch_size: int) -> Blocks:
    rows = sorted({shares[0] for shares in division.values()})
    columns = sorted({shares[1:] for shares in division.values()})
    devices: dict[tuple[int, int], list[int]] = {}
    for device, shares in division.items():
        devices.setdefault((rows.index(shares[0]), columns.index(shares[1:])), []).append(device)
    row_parts = [(int(start * batch_size), int(stop * batch_size)) for start, stop in rows]
    return Blocks(leaves, row_parts, columns, devices)
