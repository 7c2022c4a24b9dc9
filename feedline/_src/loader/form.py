"""Process-local batches in host memory, and the steps from rows to a batch: transform, cast, cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.options import BadRows
from feedline._src.order.epoch import keys_at
from feedline._src.order.schedule import BatchPositions, Cursor
from feedline._src.plan.asked import PLACE, VALID, Transform
from feedline._src.plan.plan import ProcessReads
from feedline._src.plan.shardings import Indices, LeafPlan
from feedline._src.record import PartTimes
from feedline._src.rows.bad_rows import BadRow
from feedline._src.rows.source import Rows
from feedline._src.rows.spec import Array, RowSpec, check_fits
from feedline._src.rows.values import as_array
from feedline._src.runtime.threads import annotation

_EPOCH_FACTOR = 2_654_435_761  # odd, and far from 0 modulo 2^31, so `place` differs much between adjacent epochs


class Progress(Protocol):
    """The watchdog. The loader calls `advanced` after progress. `stopped`: whether the pipeline was closed."""

    def advanced(self, stage: str) -> None: ...
    def stopped(self) -> bool: ...


class HostBatch(NamedTuple):
    """This process's part of a global batch, or of several that are delivered at once.

    Attributes:
      leaves: process-local arrays in the dtypes of the global batch, in the order in which JAX flattens it.
      after: the cursor after the batch; the feed's state contains it once the batch has been delivered.
      lanes: the states of a stream's iterators after the batch; None with random access.
      rows: the number of rows of the global batch that are not padding.
      dropped_rows: the number of rows of the source that were left out since the previous batch.
      parts: the times of each part of the batch.
      bad: the bad rows that this process supplies, ordered by offset within each global batch.
    """

    leaves: list[Array]
    after: Cursor
    lanes: dict[str, Any] | None
    rows: int
    dropped_rows: int
    parts: Sequence[PartTimes]
    bad: Sequence[BadRow]


@dataclasses.dataclass(frozen=True)
class LocalForm:
    """Describes this process's part of every batch, and transforms, casts and cuts the values that were read.

    Attributes:
      spec, out: the spec of a row in the source, and after the transform.
      seed: the seed of `Rows.key`, the random bits that a transform gets.
      part: what this process reads and places.
      bad_rows: as in `Reading`.
      ragged: the numbers of the ragged leaves.
    """

    spec: RowSpec
    out: RowSpec
    part: ProcessReads
    transform: Transform | None = None
    seed: int = 0
    bad_rows: BadRows = "raise"
    ragged: tuple[int, ...] = ()

    def write(self, read: Mapping[int, Array], leaves: list[Array], part: slice, index: Indices) -> None:
        """Cast and cut some rows, and write them to `leaves`. Raises RowError if a number does not fit its dtype.

        Numbers are checked before columns are cut, so that all processes agree on which rows are bad.

        Args:
          read: {number of a leaf: its values in these rows, after the transform}.
          leaves: the leaves to place, with all rows.
          part: the slice of these rows among all rows of the read.
          index: the row indices of these rows.
        """
        for i, values in read.items():
            check_fits(values, self.out.leaves[i], index)
            own = part
            if not self.part.by_leaf:
                own, values = self._cut(self.part.of_rows[i], part, values)
            np.copyto(leaves[i][own], values, casting="unsafe")

    def _cut(self, plan: LeafPlan, part: slice, values: Array) -> tuple[slice, Array]:
        """Cut whole rows of a leaf to what is placed. Returns (slice of the placed leaf, values for the slice)."""
        rows = self.part.rows[part]
        own = slice(*np.searchsorted(plan.rows, [rows[0], rows[-1] + 1]))
        if len(plan.rows) < len(self.part.rows):
            values = values[np.searchsorted(rows, plan.rows[own])]
        for axis, column in enumerate(plan.columns, start=1):
            values = values[(slice(None),) * axis + (column,)]
        return own, values

    def valid(self, real: npt.NDArray[np.bool_], bad: Sequence[BadRow]) -> npt.NDArray[np.bool_]:
        """Return the leaf `valid` of one batch. `real`: a value for each of `part.own_rows`, False for padding."""
        if bad and self.bad_rows == "mask":
            return real & ~np.isin(self.part.own_rows, [row.at for row in bad])  # type: ignore[arg-type]
        return real

    def with_own(self, leaves: list[Array], valid: npt.NDArray[np.bool_], after: Cursor) -> list[Array]:
        """Insert the leaves that feedline adds to a batch. The leaf `place` is computed from `after`."""
        values = {VALID: valid, PLACE: np.full(valid.shape, number_of_place(after), np.int32)}
        own, of_rows = {f"batch['{key}']": value for key, value in values.items()}, iter(leaves)
        return [own[name] if name in self.part.own else next(of_rows) for name in self.part.leaves]

    def rows_at(self, positions: BatchPositions, index: Indices) -> Rows:
        """The `Rows` that a transform gets for these positions. `index`: their row indices."""
        keys = np.empty(len(index), np.uint64)
        for epoch, here in positions.stretches():
            keys[here] = keys_at(self.seed, epoch, positions.position[here])
        return Rows(positions.epoch, positions.position, index, keys)

    def transformed(self, transform: Transform, read: list[Array], rows: Rows) -> list[Array]:
        """Transform some rows, and return their leaves. `read`: their leaves in the dtypes of the source."""
        try:
            batch = _called(transform, self.spec.tree(read), rows)
        except Exception as error:
            error.add_note(f"feedline: in the transform, at epoch {rows.epoch[0]}, position {rows.position[0]}")
            raise
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        if treedef != self.out.treedef:
            raise ValueError(f"a transform must return one tree structure, got {treedef} after {self.out.treedef}")
        arrays = [as_array(leaf.name, value) for leaf, value in zip(self.out.leaves, leaves, strict=True)]
        for leaf, array in zip(self.out.leaves, arrays, strict=True):
            if array.shape != (len(rows.index), *leaf.shape) or array.dtype != leaf.dtype:
                raise ValueError(
                    f"a transform must map row i to row i, with one dtype and shape per leaf; {leaf.name} came "
                    f"back as {array.dtype}{list(array.shape)}, not {leaf.dtype}{[len(rows.index), *leaf.shape]}"
                )
        return arrays


def number_of_place(after: Cursor) -> int:
    """The value of the leaf `place`, below 2^31. The chance that two cursors have the same value is 2^-31.

    Example:
      >>> number_of_place(Cursor(0, 64)), number_of_place(Cursor(1, 64))
      (64, 506952177)
    """
    return (after.epoch * _EPOCH_FACTOR + after.position) % (1 << 31)


def _called(transform: Transform, batch: Any, rows: Rows) -> Any:
    try:
        with annotation("transform"):
            return transform(batch, rows)
    except StopIteration as error:
        raise RuntimeError(
            "a transform must not raise StopIteration, which would be taken for the end of the feed; "
            "give next() a default, or catch the StopIteration"
        ) from error


def transformed_spec(transform: Transform, spec: RowSpec, row: list[Array]) -> RowSpec:
    """The spec of a row after `transform`, found by transforming one row twice.

    Args:
      row: the leaves of this row, each with shape [1, …].

    Raises:
      ValueError: the transform does not keep the batch axis, or gives a different result when called again.
    """
    (once, values), (again, other_values) = (_tried(transform, spec, row) for _ in range(2))
    if again == once and other_values == values:
        return once
    pairs = zip(once.leaves, again.leaves, values, other_values, strict=False)
    changed = [f"{leaf.name} of" for leaf, other, *found in pairs if leaf != other or found[0] != found[1]]
    raise ValueError(
        "a transform must return the same values for a row, bit for bit, on any process and after any resume; "
        f"{', '.join(changed)} the first row came back with other values from a second call. Draw random "
        "numbers from rows.key alone, as in np.random.default_rng(int(rows.key[i])), keep no state between calls, "
        "and write every element"
    )


def _tried(transform: Transform, spec: RowSpec, row: list[Array]) -> tuple[RowSpec, list[bytes]]:
    """Transform a copy of one row. Returns the spec of the result, and the bytes of each leaf."""
    zero = np.zeros(1, np.int64)
    copied = spec.tree([leaf.copy() for leaf in row])  # the transform may write into its arguments
    transformed = _called(transform, copied, Rows(zero, zero, zero, np.zeros(1, np.uint64)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(transformed):
        if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (1,):
            raise ValueError(
                f"a transform must return NumPy arrays with one row for each row it got; for 1 row "
                f"batch{jax.tree_util.keystr(path)} came back as {type(leaf).__name__}{getattr(leaf, 'shape', '')}"
            )
        as_array(f"batch{jax.tree_util.keystr(path)}", leaf)
    out = RowSpec.of(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), transformed))
    # `tobytes` copies, because the next call may write into the memory of this result
    return out, [leaf.tobytes() for leaf in jax.tree.leaves(transformed)]
