"""Processes that own the same rows compare checksums of what they read of them, while they train."""

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

from feedline.agreement.coordination import Coordination
from feedline.errors import ProcessError
from feedline.order.schedule import Cursor
from feedline.placement.plan import LeafPlan, replicas

_BLOCKS = 32
"""How many checksums a leaf gets, so that the rows that differ can be named."""
_KEPT = 8
"""Checks whose checksums can still be looked up: by so many may one process be ahead of another."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf, what this process supplies of it, and the others that supply the same part."""

    name: str
    plan: LeafPlan
    others: list[int]


class ReplicaCheck:
    """Publishes checksums of every `every`-th batch, and compares them with those that lie there already.

    Nobody waits: of two processes the later one finds what the earlier one published, and fails. Its monitor
    ends the other. Called by all threads that place, at once.

    Args:
      key: of the feed, the same in every process.
      every: batches from one check to the next.
      batch_size, epoch_rows: to count batches by their cursor (None: a stream, counted in each epoch), for
        the processes must check the same ones, also after one has begun a run anew.
      spec: of the global batch, with shardings.
      plans: what this process supplies of each leaf.
    """

    def __init__(
        self,
        service: Coordination,
        key: str,
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
            _Leaf(f"batch{jax.tree_util.keystr(path)}", plan, _others(service.process, leaf))
            for (path, leaf), plan in zip(jax.tree_util.tree_leaves_with_path(spec), plans, strict=True)
        ]

    def __call__(self, leaves: Sequence[npt.NDArray[Any]], after: Cursor) -> None:
        """Check a process-local batch, if it is one of those that are checked.

        Args:
          after: the cursor after it.

        Raises:
          ProcessError: another process has other bytes in rows of which this one is a replica.
        """
        number = (after.epoch * self._epoch_rows + after.position) // self._batch_size
        shared = [i for i, leaf in enumerate(self._leaves) if leaf.others]
        if number % self._every or not shared:
            return
        mine = {str(i): checksums(leaves[i]) for i in shared}
        batch = f"{self._key}/{after.epoch}.{after.position}"
        self._publish(f"{batch}/{self._service.process}", json.dumps(mine))
        for key, value in self._service.dir(batch).items():
            self._compare(int(key.rpartition("/")[2]), mine, json.loads(value), after)

    def _publish(self, key: str, value: str) -> None:
        """And let go of what is too old for anybody to look it up."""
        self._service.delete(key)  # of an earlier visit, before a seek
        self._service.set(key, value)
        self._published.append(key)
        if len(self._published) > _KEPT:
            self._service.delete(self._published.popleft())

    def _compare(self, other: int, mine: dict[str, Any], theirs: dict[str, Any], after: Cursor) -> None:
        for number, sums in mine.items():
            leaf = self._leaves[int(number)]
            if other not in leaf.others or theirs.get(number) == sums:
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
    """A CRC-32 of each of up to 32 equal blocks of its rows.

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
