"""The source for files that store rows in groups: row groups, record batches, chunks."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.files.lru_cache import LruCache
from feedline._src.files.opening import check_may_open
from feedline._src.formats.grouped_file import Group, GroupedFile, check_fits, check_group
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.versioned_files import VersionedFiles, Versions
from feedline._src.placement.plan import Columns
from feedline._src.rows.indexed import IndexedSource
from feedline._src.rows.shards import Indices, Shards, count_of, joined
from feedline._src.runtime.ending import check_may_read
from feedline._src.sources.row_gather import RowGather

Array = npt.NDArray[Any]


class GroupSource(IndexedSource):
    """A `RowSource` over files that store rows in groups, each of which can only be read whole.

    The most recently used groups stay in a cache of at most `cache_bytes`, so an order should read neighbouring
    rows soon after each other, as a blocked order does. Reads are thread-safe; a group that two threads need is
    read once.

    A file must not change while it is open: its version is taken before it is opened, checked whenever a group is
    read, and sent to worker processes with the source.

    Args:
      open_file: (path or object in a store, options) → the open file.
      paths: of the files, in the order of their rows.
      options: columns and cache_bytes.
      versions: the expected versions of the files, None for a directory; by default, the present ones. Or the
        files themselves, open.

    Raises:
      ValueError: no rows, or files that do not fit together.
      FeedError: a file does not have the expected version.
    """

    def __init__(
        self,
        open_file: Callable[[Any, OpenOptions], GroupedFile],
        paths: Sequence[str],
        options: OpenOptions,
        versions: Versions | VersionedFiles | None = None,
    ) -> None:
        self._open_file = open_file
        self._paths = paths
        self._options = options
        self._versioned = VersionedFiles.of(paths, options.store, versions)
        self._files = [self._versioned.opened(file, open_file, options) for file in range(len(paths))]
        self.spec = self._files[0].spec
        for path, file in zip(paths, self._files, strict=True):
            check_fits(file, path, self._files[0], paths[0])
        leaves = range(len(self._files[0].lengths))
        self._groups = [Shards([count_of(file.lengths[leaf]) for file in self._files]) for leaf in leaves]
        """For each leaf, the file of each group."""
        self._shards = [joined([file.lengths[leaf] for file in self._files]) for leaf in leaves]
        """For each leaf, the group of each row."""
        if len(self) == 0:
            raise ValueError(f"a source must have at least one row, got {paths[0]} with none; check what wrote it")
        self._cache: LruCache[Group] = LruCache(options.cache_bytes)

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        return self._identity(allow_bad_rows=False)

    def identity_allowing_bad_rows(self) -> dict[str, Any]:
        """The `identity` with each sampled row that cannot be read as a part of it, instead of an error."""
        return self._identity(allow_bad_rows=True)

    def _identity(self, allow_bad_rows: bool) -> dict[str, Any]:
        files = []
        for i, file in enumerate(self._files):
            self._versioned.check(i)
            files.append(file.identity(allow_bad_rows))
            self._versioned.check(i)
        return {"kind": "groups", "files": files}

    def __len__(self) -> int:
        return len(self._shards[0])

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`.

        Raises:
          RowError: a row has a null, or its group cannot be read.
          FeedError: a file has changed since it was opened.
        """
        for leaf, target in enumerate(jax.tree_util.tree_leaves(out)):
            self.read_leaf(leaf, rows, (slice(None),) * (target.ndim - 1), target)

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of rows[i] of one leaf to out[i], which has the leaf's dtype."""
        shards = self._shards[leaf]
        group = shards.of(rows)
        touched = np.unique(group)
        at_once = self._groups_at_once(leaf, touched)
        for start in range(0, len(touched), at_once):
            numbers = touched[start : start + at_once]
            groups = self._cached_groups(leaf, numbers.tolist())
            here: Any = slice(None) if len(numbers) == len(touched) else np.flatnonzero(np.isin(group, numbers))
            part = np.searchsorted(numbers, group[here])
            local = rows[here] - shards.firsts_of(group[here])
            self._check_nulls(leaf, groups, part, local, rows[here])
            target = out[here]  # a copy, unless these are all groups
            firsts = np.cumsum([0, *(len(group.values) for group in groups[:-1])])
            RowGather([group.values for group in groups]).read(firsts.take(part) + local, columns, target)
            if len(numbers) < len(touched):
                out[here] = target

    def _groups_at_once(self, leaf: int, touched: Indices) -> int:
        """How many of these groups a read may hold at a time: those that fit into cache_bytes, at least one."""
        row = self._row(leaf)
        most = int(self._shards[leaf].lengths_of(touched).max(initial=1))
        row_bytes: int = math.prod(row.shape) * row.dtype.itemsize
        return max(1, self._options.cache_bytes // max(1, most * row_bytes))

    def _row(self, leaf: int) -> Any:
        return jax.tree_util.tree_leaves(self.spec)[leaf]

    def _cached_groups(self, leaf: int, groups: list[int]) -> list[Group]:
        """These groups, from the cache or the files."""
        # threads of one batch need the same groups: each starts at another one, to read them in parallel
        first = threading.get_native_id() % len(groups)
        rotated = [*groups[first:], *groups[:first]]
        read = {
            group: self._cache.get((leaf, group), functools.partial(self._read_group, leaf, group))
            for group in rotated
        }
        return [read[group] for group in groups]

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        file = self._groups[0].of(self._shards[0].of(np.array([row])))
        return str(self._paths[int(file[0])])

    def close(self) -> None:
        """Drop the cached groups, and give up what is being fetched."""
        self._cache.clear()
        self._versioned.close()
        for file in self._files:
            file.close()

    def _read_group(self, leaf: int, group: int) -> Group:
        """Read a group from its file, and check it."""
        check_may_read()
        one = np.array([group])
        ((file, within, _),) = self._groups[leaf].split(one)
        self._versioned.check(file)
        try:
            read = self._files[file].read(leaf, int(within[0]))
            check_group(read, int(self._shards[leaf].lengths_of(one)[0]), self._row(leaf))
        except FeedError:
            raise
        except Exception as error:
            self._versioned.check(file)  # a change of the file explains any other error, and is not a bad row
            check_may_open(error, str(self._paths[file]))
            raise RowError(
                f"rows that are stored together could not be read: {error}",
                stage="read",
                row=int(self._shards[leaf].firsts_of(one)[0]),
                file=str(self._paths[file]),
            ) from error
        self._versioned.check(file)
        return read

    def _check_nulls(
        self, leaf: int, groups: Sequence[Group], part: Indices, local: Indices, rows: Indices
    ) -> None:
        """Refuse a read that asks for a row with a null; the error names the first one."""
        first = len(rows)
        for i, group in enumerate(groups):
            if group.null is not None:
                asked = np.flatnonzero(part == i)
                first = min([first, *asked[group.null[local[asked]]][:1]])
        if first == len(rows):
            return
        path, _ = jax.tree_util.tree_leaves_with_path(self.spec)[leaf]
        file = self._groups[leaf].of(self._shards[leaf].of(rows[first : first + 1]))[0]
        raise RowError(
            f"every column of a row must have a value, and source{jax.tree_util.keystr(path)} is null in this row;"
            " fill nulls (docs/tables.md) and write the file again, leave the column out with "
            "columns=[...], or take another row in its place with feedline.Reading(bad_rows='substitute')",
            stage="read",
            row=int(rows[first]),
            file=str(self._paths[file]),
        )

    @property
    def will_read(self) -> Callable[[Indices, int], bool] | None:
        """The `will_read` of a `ToldSource`, for objects in a store; None for files."""
        return self._fetch_ahead if self._versioned.in_store or self._files[0].fetch_ahead is not None else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        if self._versioned.in_store:
            return self._versioned.fetch_ahead(self._extents(rows), ahead)
        for leaf, file, groups in self._touched(rows):
            fetch = self._files[file].fetch_ahead
            if fetch is None or not fetch(leaf, groups, ahead):
                return False
        return True

    def _touched(self, rows: Indices) -> Iterator[tuple[int, int, list[int]]]:
        """Leaf, file, and numbers in it of the groups of some rows."""
        for leaf, shards in enumerate(self._shards):
            for file, within, _ in self._groups[leaf].split(np.unique(shards.of(rows))):
                yield leaf, file, within.tolist()

    def _extents(self, rows: Indices) -> list[tuple[int, tuple[int, int]]]:
        """Where rows of objects lie: number of the object, and offset and length of each part."""
        return [
            (file, part)
            for leaf, file, groups in self._touched(rows)
            for group in groups
            for part in self._files[file].extents(leaf, group)
        ]

    def __reduce__(self) -> Any:
        return type(self), (self._open_file, self._paths, self._options, self._versioned.versions)
