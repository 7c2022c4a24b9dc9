"""Processes that read the same rows compare checksums of them during training."""

from __future__ import annotations

import collections
import dataclasses
import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.agreement.coordination import Coordination
from feedline._src.errors import ProcessError
from feedline._src.order.schedule import Cursor
from feedline._src.placement.plan import LeafPlan, replicas

_BLOCKS = 32
"""Checksums of each leaf of a batch: an error names the block of rows that differs."""
_KEPT = 8
"""Checks whose checksums stay in the service: a process that is further behind is not compared."""


@dataclasses.dataclass(frozen=True)
class _CheckedLeaf:
    """A leaf, the part of it that this process supplies, and the other processes that supply the same part."""

    name: str
    plan: LeafPlan
    others: list[int]


class ReplicaCheck:
    """Compares checksums of every `every`-th batch with those of the other processes that read the same rows.

    The first process of such a group publishes its checksums, and each later one compares its own with them: two
    calls, however many there are. No process waits for another. The one that differs from the first raises, and
    the monitor then ends the others. May be called by several threads at once.

    Args:
      key: a path for keys of this feed, the same in every process.
      every: a check takes place every so many batches.
      batch_size: rows of a global batch.
      epoch_rows: rows of an epoch; None for a stream. With the batch size it gives the number of a batch from its
        cursor, so that all processes check the same batches, also after one of them started its pipeline again.
      spec: of the global batch, with shardings.
      plans: for each leaf, the part that this process supplies.
    """

    def __init__(
        self,
        service: Coordination,
        key: str,
        *,
        every: int,
        batch_size: int,
        epoch_rows: int | None,
        spec: Any,
        plans: Sequence[LeafPlan],
    ) -> None:
        self._service = service
        self._key = key
        self._every = every
        self._batch_size = batch_size
        self._epoch_rows = epoch_rows or 0
        self._published: collections.deque[str] = collections.deque()
        self._leaves = [
            _CheckedLeaf(f"batch{jax.tree_util.keystr(path)}", plan, _others(service.process, leaf))
            for (path, leaf), plan in zip(jax.tree_util.tree_leaves_with_path(spec), plans, strict=True)
        ]
        self._groups: dict[tuple[int, ...], list[int]] = {}  # the leaves that a group of processes shares
        for i, leaf in enumerate(self._leaves):
            if leaf.others:
                self._groups.setdefault((service.process, *leaf.others), []).append(i)

    def __call__(self, leaves: Sequence[npt.NDArray[Any]], after: Cursor) -> None:
        """Check a process-local batch, if its number is a multiple of `every`.

        Args:
          after: the cursor after the batch.

        Raises:
          ProcessError: another process, which supplies the same rows, has other bytes.
        """
        number = (after.epoch * self._epoch_rows + after.position) // self._batch_size
        if number % self._every:
            return
        for group, shared in self._groups.items():
            own = {str(i): checksums(leaves[i]) for i in shared}
            key = f"{self._key}/{after.epoch}.{after.position}/{shared[0]}.{min(group)}"
            if self._service.set(key, json.dumps([self._service.process, own])):
                self._delete_later(key)
                continue
            published = self._service.try_get(key)
            if published is not None:  # None: another process is more than `_KEPT` checks ahead, and deleted it
                other, theirs = json.loads(published)
                self._compare(other, own, theirs, after)

    def _delete_later(self, key: str) -> None:
        """Delete the oldest key of this process once there are more than `_KEPT`."""
        self._published.append(key)
        if len(self._published) > _KEPT * len(self._groups):
            self._service.delete(self._published.popleft())

    def _compare(self, other: int, own: dict[str, Any], theirs: dict[str, Any], after: Cursor) -> None:
        for number, sums in own.items():
            leaf = self._leaves[int(number)]
            if other not in leaf.others or theirs[number] == sums:  # not in: this process, before a seek
                continue
            block = next(i for i, (one, two) in enumerate(zip(sums, theirs[number], strict=True)) if one != two)
            rows = leaf.plan.rows[_blocks(len(leaf.plan.rows))[block]]
            raise ProcessError(
                "processes that own the same rows must read the same bytes: "
                f"processes {self._service.process} and {other} differ in {leaf.name}, first among rows {rows[0]} "
                f"to {rows[-1]} of the batch before epoch {after.epoch}, position {after.position}. Compare their "
                "copies of the data; where rows are augmented, draw from rows.key or seed Grain's random maps",
                stage="read",
                process=other,
            )


def checksums(leaf: npt.NDArray[Any]) -> list[int]:
    """A CRC-32 for each of up to 32 blocks of equally many rows.

    Example:
      >>> first, second = checksums(np.zeros((2, 3))), checksums(np.array([[0.0] * 3, [0, 0, 1]]))
      >>> [a == b for a, b in zip(first, second)]
      [True, False]
    """
    return [zlib.crc32(np.ascontiguousarray(leaf[block]).view(np.uint8).data) for block in _blocks(len(leaf))]


def _blocks(rows: int) -> list[slice]:
    count = min(rows, _BLOCKS)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _others(process: int, leaf: jax.ShapeDtypeStruct) -> list[int]:
    (group,) = [group for group in replicas(leaf.sharding, leaf.shape) if process in group]
    return [other for other in group if other != process]
