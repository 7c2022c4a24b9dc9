"""Rows stored in groups that are read whole: row groups, record batches, chunks."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from feedline.errors import RowError
from feedline.loader.declared import Declared
from feedline.loader.ending import check_may_read
from feedline.loader.kept import Kept
from feedline.loader.scattered import Scattered
from feedline.loader.shards import Indices, Shards
from feedline.placement.plan import Columns

Array = npt.NDArray[Any]


class GroupedFile(NamedTuple):
    """What one file holds. Leaves are counted in the order in which JAX flattens `spec`.

    Attributes:
      spec: tree of `jax.ShapeDtypeStruct`, of one row.
      lengths: for each leaf, the rows of each of its groups.
      read: (leaf, group) → its rows. Called from many threads.
      identity: what tells this data from other data, as JSON values, without a path.
    """

    spec: Any
    lengths: Sequence[Sequence[int]]
    read: Callable[[int, int], Array]
    identity: Callable[[], Any]


class GroupSource:
    """A `RowSource` over files whose rows lie in groups.

    A group that is read is kept, with the others that were used last, in at most `cache_bytes`: rows
    that lie near each other should be asked for near each other, as a blocked order does. Reads are
    thread-safe; two threads that need one group read it once.

    Args:
      open_file: (path, declared) → what that file holds.
      paths: of the files, whose rows follow each other.
      declared: columns and cache_bytes.

    Raises:
      ValueError: no rows, or files that do not fit together.
    """

    def __init__(
        self, open_file: Callable[[Path, Declared], GroupedFile], paths: Sequence[str], declared: Declared
    ) -> None:
        self._arguments = (open_file, paths, declared)
        self._paths = paths
        self._declared = declared
        self._files = [open_file(Path(path), declared) for path in paths]
        self.spec = self._files[0].spec
        for path, file in zip(paths, self._files, strict=True):
            _check_fits(file, path, self._files[0], paths[0])
        leaves = range(len(self._files[0].lengths))
        self._groups = [
            [(file, group) for file, held in enumerate(self._files) for group in range(len(held.lengths[leaf]))]
            for leaf in leaves
        ]
        self._shards = [Shards([n for file in self._files for n in file.lengths[leaf]] or [0]) for leaf in leaves]
        if len(self) == 0:
            raise ValueError(f"a source must have at least one row, got {paths[0]} with none")
        self._kept = Kept(declared.cache_bytes)

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        return {"kind": "groups", "files": [file.identity() for file in self._files]}

    def __len__(self) -> int:
        return len(self._shards[0])

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`."""
        for leaf, target in enumerate(jax.tree_util.tree_leaves(out)):
            self.read_leaf(leaf, rows, (slice(None),) * (target.ndim - 1), target)

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of rows[i] of one leaf to out[i], which has the leaf's dtype."""
        shards = self._shards[leaf]
        group = shards.of(rows)
        touched = np.unique(group)
        room = self._held_at_once(leaf, touched)
        for start in range(0, len(touched), room):
            held = touched[start : start + room]
            arrays = self._arrays(leaf, held.tolist())
            here: Any = slice(None) if len(held) == len(touched) else np.flatnonzero(np.isin(group, held))
            part = np.searchsorted(held, group[here])
            local = rows[here] - shards.firsts.take(group[here])
            target = out[here]  # a copy where it is not all of it
            Scattered(arrays).read(part, local, columns, target)
            if len(held) < len(touched):
                out[here] = target

    def _held_at_once(self, leaf: int, touched: Indices) -> int:
        """How many of these groups a read holds at a time: those that fit into cache_bytes, at least one."""
        shards, row = self._shards[leaf], jax.tree_util.tree_leaves(self.spec)[leaf]
        most = (
            (shards.ends - shards.firsts).take(touched).max(initial=1) * row.dtype.itemsize * math.prod(row.shape)
        )
        return max(1, self._declared.cache_bytes // max(1, int(most)))

    def _arrays(self, leaf: int, groups: list[int]) -> list[Array]:
        """The rows of these groups."""
        # threads that read one batch need the same groups: each begins at another one, so as not to wait in line
        first = threading.get_native_id() % len(groups)
        rotated = [*groups[first:], *groups[:first]]
        read = {
            group: self._kept.get((leaf, group), functools.partial(self._group, leaf, group)) for group in rotated
        }
        return [read[group] for group in groups]

    def close(self) -> None:
        """Let go of what is kept."""
        self._kept.clear()

    def _group(self, leaf: int, group: int) -> Array:
        check_may_read()
        file, within = self._groups[leaf][group]
        try:
            return self._files[file].read(leaf, within)
        except Exception as error:
            raise RowError(
                f"rows that are stored together could not be read: {error}",
                stage="read",
                row=int(self._shards[leaf].firsts[group]),
                file=str(self._paths[file]),
            ) from error

    def __reduce__(self) -> Any:
        return type(self), self._arguments


def _check_fits(file: GroupedFile, path: str, first: GroupedFile, first_path: str) -> None:
    forms = [
        {
            jax.tree_util.keystr(at): (str(leaf.dtype), leaf.shape)
            for at, leaf in jax.tree_util.tree_leaves_with_path(held.spec)
        }
        for held in (file, first)
    ]
    if forms[0] != forms[1]:
        raise ValueError(
            f"files must agree in columns, dtypes and row shapes; {path} has {forms[0]}, {first_path} {forms[1]}; "
            "choose columns=[...] that they share, or write them again"
        )
    totals = {sum(groups) for groups in file.lengths}
    if len(totals) > 1:
        raise ValueError(f"all leaves must have the same number of rows, {path} has {sorted(totals)}")
