"""During training, processes that read the same rows compare checksums of these rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.agreement.coordination import Comparison, Coordination
from feedline._src.errors import ProcessError
from feedline._src.order.schedule import Cursor
from feedline._src.plan.shardings import plan_leaf, replicas

_BLOCKS = 32  # the most blocks of rows of a leaf, each with a checksum; an error names the block that differs
_KEPT = 8  # how many checks the service keeps; a process that is further behind is not compared


class ReplicaCheck:
    """Compares checksums of every `every`-th batch among the processes that read the same rows.

    A process raises if it differs from the one that checked first. Then the others end, too. Thread-safe.

    The number of a batch is computed from its cursor, so all processes check the same batches, even after one of
    them has started another pipeline. With `steps_per_call` > 1, that many batches are checked as one.
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
        steps_per_call: int = 1,
    ) -> None:
        self._process = service.process
        self._path = f"{key}/replicas"
        self._every = every
        self._batch_size = batch_size * steps_per_call
        self._compared = ("rows", "batch") if steps_per_call == 1 else ("batches", "call")
        self._epoch_rows = epoch_rows or 0
        self._leaves: list[tuple[str, Any]] = []  # names and specs
        self._shared: dict[int, list[int]] = {}  # {lowest process of a group: leaves whose rows the group shares}
        for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(spec)):
            self._leaves.append((f"batch{jax.tree_util.keystr(path)}", leaf))
            (group,) = [group for group in replicas(leaf.sharding, leaf.shape) if service.process in group]
            if len(group) > 1:
                self._shared.setdefault(min(group), []).append(i)
        self._comparison = Comparison(service, _KEPT * len(self._shared))

    def __call__(self, leaves: Sequence[npt.NDArray[Any]], after: Cursor) -> None:
        """Check a process-local batch if its number is a multiple of `every`. `after` is the cursor after it."""
        number = (after.epoch * self._epoch_rows + after.position) // self._batch_size
        if number % self._every:
            return
        for first, shared in self._shared.items():
            own = [checksums(leaves[i]) for i in shared]
            found = self._comparison.differing(
                f"{self._path}/{after.epoch}.{after.position}/{shared[0]}.{first}", own
            )
            if found is None or found[0] == self._process:  # or its own value, from before a `seek`
                continue
            other, theirs = found
            leaf = next(i for i, (one, two) in enumerate(zip(own, theirs, strict=True)) if one != two)
            sums = zip(own[leaf], theirs[leaf], strict=True)
            block = next(i for i, (one, two) in enumerate(sums) if one != two)
            name, spec = self._leaves[shared[leaf]]
            rows = plan_leaf(spec.sharding, spec.shape, spec.sharding.addressable_devices, name).rows
            rows = rows[_blocks(len(rows))[block]]
            raise ProcessError(
                "processes that own the same rows must read the same bytes: "
                f"processes {self._process} and {other} differ in {name}, first among {self._compared[0]} "
                f"{rows[0]} to {rows[-1]} of the {self._compared[1]} that ends at epoch {after.epoch}, position "
                f"{after.position}. Compare their copies of the data; where rows are augmented, draw from "
                "rows.key or seed Grain's random maps",
                stage="read",
                process=other,
            )


def checksums(leaf: npt.NDArray[Any]) -> list[int]:
    """A CRC-32 for each of up to 32 blocks of almost equally many rows.

    Example:
      >>> first, second = checksums(np.zeros((2, 3))), checksums(np.array([[0.0] * 3, [0, 0, 1]]))
      >>> [a == b for a, b in zip(first, second)]
      [True, False]
    """
    return [zlib.crc32(np.ascontiguousarray(leaf[block]).view(np.uint8).data) for block in _blocks(len(leaf))]


def _blocks(rows: int) -> list[slice]:
    count = min(rows, _BLOCKS)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]
