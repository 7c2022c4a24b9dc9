"""Rows of a `grain.MapDataset`, record by record: each is written straight into its place."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
import numpy.typing as npt

from feedline.errors import RowError
from feedline.loader.bad_rows import check_is_of_a_row
from feedline.loader.spec import Leaf, RowSpec

_GROUP = 64
"""Records that Grain is asked for at once, and so are held beside the batch, if each has memory of its own."""


class RecordSource:
    """A `RowSource` over a Grain dataset: decoding and augmentation are Grain's, order is feedline's.

    It is asked for element epoch·n + row, so that Grain's own random maps differ between epochs;
    `batches` knows that from the attribute `per_epoch`.

    Raises:
      ValueError: the dataset is empty.
      RowError: its first element cannot be had, or is None.

    Example:
      >>> source = RecordSource(grain.MapDataset.range(5).map(lambda i: {"x": np.float32(i)}))
      >>> out = {"x": np.empty(2, np.float32)}
      >>> source.read(np.array([4, 1]), out)
      >>> out["x"].tolist()
      [4.0, 1.0]
    """

    per_epoch = True
    picklable = True  # Grain pickles the user's dataset, and names the part that it cannot

    def __init__(self, dataset: grain.MapDataset[Any]) -> None:
        self._dataset = dataset
        if len(dataset) == 0:
            raise ValueError("a source must have at least one row, got a MapDataset of length 0")
        first = self._element(0)
        self._spec = RowSpec.of(as_arrays(first))
        self._group = 1 if self._may_be_written_over(first) else _GROUP
        self.spec = self._spec.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._spec.leaves])

    @property
    def identity(self) -> dict[str, Any]:
        """Digests of the first, the middle and the last element."""
        return self._identity(lambda i: digest_of(self._element(i)))

    def identity_of_good(self) -> dict[str, Any]:
        """As `identity`, but an element that cannot be had counts as such."""

        def sampled(i: int) -> str | None:
            try:
                return digest_of(self._element(i))
            except RowError as error:
                check_is_of_a_row(error)
                return None

        return self._identity(sampled)

    def _may_be_written_over(self, first: Any) -> bool:
        """Whether the last element lies in the memory of the first: a decoder may use one buffer for all."""
        try:
            last = self._element(len(self._dataset) - 1)
        except RowError:
            return True  # not known
        pairs = itertools.product(jax.tree_util.tree_leaves(first), jax.tree_util.tree_leaves(last))
        return any(
            np.may_share_memory(one, other)
            for one, other in pairs
            if isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        )

    def _identity(self, sampled: Callable[[int], str | None]) -> dict[str, Any]:
        n = len(self._dataset)
        return {"kind": "records", "length": n, "sampled": [sampled(i) for i in sorted({0, n // 2, n - 1})]}

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        """Write element rows[i] to index i of each leaf of `out`."""
        targets = jax.tree_util.tree_leaves(out)
        indices = rows.tolist()
        for start in range(0, len(indices), self._group):
            records = tuple(self._elements(indices[start : start + self._group]))
            if not _write_alike(records, self._spec, targets, start):
                self._write_one_by_one(records, indices, targets, start)

    def close(self) -> None:
        """Nothing to do: the dataset is the user's."""

    def _write_one_by_one(
        self, records: Sequence[Any], indices: list[int], targets: list[Any], start: int
    ) -> None:
        for i, record in enumerate(records, start):
            try:
                write_record(record, self._spec, targets, i)
            except (TypeError, ValueError, OverflowError) as error:
                raise RowError(
                    f"every record must have the form of the first: {error}",
                    stage="read",
                    row=indices[i] % len(self._dataset),
                ) from error

    def _elements(self, indices: list[int]) -> Iterable[Any]:
        """The elements, asked for at once, which spares a sixth of Grain's time; one by one where one fails.

        Grain's name for that is private; where it is gone, or gives an error, the second look tells more.
        """
        try:
            records = self._dataset._getitems(indices)
        except Exception:  # noqa: BLE001
            return map(self._element, indices)
        whole = len(records) == len(indices) and all(record is not None for record in records)
        return records if whole else map(self._element, indices)

    def _element(self, index: int) -> Any:
        row = index % len(self._dataset)
        try:
            record = self._dataset[index]
        except Exception as error:
            raise RowError(
                f"the dataset failed on this row with {type(error).__name__}: {error}", stage="read", row=row
            ) from error
        if record is None:
            told = next(_filters(self._dataset), "a transformation")
            raise RowError(
                f"a MapDataset must have an element at every index, and {told} left None here; a filter "
                "changes the number of rows, so filter a stream: pass dataset.to_iter_dataset() instead",
                stage="read",
                row=row,
            )
        return record


def _write_alike(records: tuple[Any, ...], spec: RowSpec, targets: list[Any], start: int) -> bool:
    """Write the records to the targets from index `start` on, if all are of the form of `spec`: whether so.

    Flattened together they take less time than each for itself.
    """
    values, treedef = jax.tree_util.tree_flatten(records)
    if treedef != _trees_of(spec.treedef, len(records)):
        return False
    try:
        for j, (leaf, target) in enumerate(zip(spec.leaves, targets, strict=True)):
            for i, value in enumerate(values[j :: len(targets)], start):
                _write_value(value, leaf, target, i)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


@functools.lru_cache(maxsize=8)
def _trees_of(treedef: jax.tree_util.PyTreeDef, count: int) -> jax.tree_util.PyTreeDef:
    """The tree of a tuple of `count` such trees."""
    return jax.tree_util.treedef_tuple([treedef] * count)


def write_record(record: Any, spec: RowSpec, targets: list[Any], i: int) -> None:
    """Write each leaf of a record to index i of its target.

    Raises:
      ValueError: the record's tree, shapes or dtypes are not those of `spec`.
    """
    values, treedef = jax.tree_util.tree_flatten(record)
    if treedef != spec.treedef:
        raise ValueError(f"its tree is {treedef}, the first one's {spec.treedef}")
    for value, target, leaf in zip(values, targets, spec.leaves, strict=True):
        _write_value(value, leaf, target, i)


def _write_value(value: Any, leaf: Leaf, target: Any, i: int) -> None:
    if getattr(value, "shape", None) != leaf.shape or value.dtype != leaf.dtype:
        _check_value(value, leaf)
    target[i] = value


def _check_value(value: Any, leaf: Leaf) -> None:
    """Refuse a record's leaf that differs from the first record's; Python numbers are taken as they are.

    Raises:
      ValueError: another shape or dtype.
    """
    array = np.asarray(value)
    plain = isinstance(value, int | float) and np.can_cast(array.dtype, leaf.dtype, "same_kind")
    if array.shape != leaf.shape or not (plain or array.dtype == leaf.dtype):
        raise ValueError(
            f"{leaf.name} is {array.dtype}{list(array.shape)}, the first record's {leaf.dtype}{list(leaf.shape)}; "
            "crop, pad or convert in a map"
        )


def digest_of(record: Any) -> str:
    """A digest of the bytes of a record's leaves."""
    hashed = hashlib.sha256()
    for value in jax.tree_util.tree_leaves(record):
        hashed.update(np.ascontiguousarray(value).tobytes())
    return hashed.hexdigest()[:32]


def as_arrays(record: Any) -> Any:
    """Python numbers have no dtype: give the first record's leaves one."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, int | float | complex) else x, record)


def _filters(dataset: Any) -> Iterator[str]:
    """The filters above a dataset, nearest first."""
    if "Filter" in type(dataset).__name__:
        yield str(dataset)
    for parent in getattr(dataset, "parents", ()):
        yield from _filters(parent)
