"""Rows stored in groups that are read whole: row groups, record batches, chunks."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline.errors import FeedError, RowError
from feedline.placement.plan import Columns
from feedline.rows.indexed import IndexedSource
from feedline.rows.shards import Indices, Shards, count_of, joined
from feedline.runtime.ending import check_may_read
from feedline.sources.formats.file_version import FileVersion
from feedline.sources.formats.grouped_file import Group, GroupedFile, check_fits, check_group
from feedline.sources.formats.open_options import OpenOptions
from feedline.sources.lru_cache import LruCache
from feedline.sources.row_gather import RowGather

Array = npt.NDArray[Any]


class GroupSource(IndexedSource):
    """A `RowSource` over files whose rows lie in groups.

    A group that is read is kept, with the others that were used last, in at most `cache_bytes`: rows
    that lie near each other should be asked for near each other, as a blocked order does. Reads are
    thread-safe; two threads that need one group read it once.

    A file must not change while it is open: its version is taken before it is opened, checked whenever a group is
    read, and travels with the source to worker processes.

    Args:
      open_file: (path, options) → what that file holds.
      paths: of the files, whose rows follow each other.
      options: columns and cache_bytes.
      versions: of the files, None for a directory. Without them the files are taken as they are now.

    Raises:
      ValueError: no rows, or files that do not fit together.
      FeedError: a file is not of the version given.
    """

    def __init__(
        self,
        open_file: Callable[[Path, OpenOptions], GroupedFile],
        paths: Sequence[str],
        options: OpenOptions,
        versions: Sequence[FileVersion | None] | None = None,
    ) -> None:
        self._open_file = open_file
        self._paths = paths
        self._options = options
        self._versions = [_version(path) for path in paths] if versions is None else versions
        self._files = [self._opened(file) for file in range(len(paths))]
        self.spec = self._files[0].spec
        for path, held in zip(paths, self._files, strict=True):
            check_fits(held, path, self._files[0], paths[0])
        leaves = range(len(self._files[0].lengths))
        self._groups = [Shards([count_of(file.lengths[leaf]) for file in self._files]) for leaf in leaves]
        """For each leaf, which groups are of which file."""
        self._shards = [joined([file.lengths[leaf] for file in self._files]) for leaf in leaves]
        """For each leaf, which rows are of which group."""
        if len(self) == 0:
            raise ValueError(f"a source must have at least one row, got {paths[0]} with none")
        self._cache: LruCache[Group] = LruCache(options.cache_bytes)

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        return self._identity(of_good=False)

    def identity_of_good(self) -> dict[str, Any]:
        """As `identity`, but a sampled row that cannot be read counts as such."""
        return self._identity(of_good=True)

    def _identity(self, of_good: bool) -> dict[str, Any]:
        files = []
        for i, held in enumerate(self._files):
            self._check_unchanged(i)
            files.append(held.identity(of_good))
            self._check_unchanged(i)
        return {"kind": "groups", "files": files}

    def __len__(self) -> int:
        return len(self._shards[0])

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`.

        Raises:
          RowError: a row holds a null, or its group cannot be read.
          FeedError: a file has changed since it was opened.
        """
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
            groups = self._held(leaf, held.tolist())
            here: Any = slice(None) if len(held) == len(touched) else np.flatnonzero(np.isin(group, held))
            part = np.searchsorted(held, group[here])
            local = rows[here] - shards.firsts_of(group[here])
            self._check_nulls(leaf, groups, part, local, rows[here])
            target = out[here]  # a copy where it is not all of it
            firsts = np.cumsum([0, *(len(group.values) for group in groups[:-1])])
            RowGather([group.values for group in groups]).read(firsts.take(part) + local, columns, target)
            if len(held) < len(touched):
                out[here] = target

    def _held_at_once(self, leaf: int, touched: Indices) -> int:
        """How many of these groups a read holds at a time: those that fit into cache_bytes, at least one."""
        row = self._row(leaf)
        most = int(self._shards[leaf].lengths_of(touched).max(initial=1))
        row_bytes: int = math.prod(row.shape) * row.dtype.itemsize
        return max(1, self._options.cache_bytes // max(1, most * row_bytes))

    def _row(self, leaf: int) -> Any:
        return jax.tree_util.tree_leaves(self.spec)[leaf]

    def _held(self, leaf: int, groups: list[int]) -> list[Group]:
        """These groups, from the cache or the files."""
        # threads that read one batch need the same groups: each begins at another one, so as not to wait in line
        first = threading.get_native_id() % len(groups)
        rotated = [*groups[first:], *groups[:first]]
        read = {
            group: self._cache.get((leaf, group), functools.partial(self._group, leaf, group)) for group in rotated
        }
        return [read[group] for group in groups]

    def close(self) -> None:
        """Drop the cached groups."""
        self._cache.clear()

    def _group(self, leaf: int, group: int) -> Group:
        """One group, read from its file and checked."""
        check_may_read()
        one = np.array([group])
        ((file, within, _),) = self._groups[leaf].split(one)
        self._check_unchanged(file)
        try:
            read = self._files[file].read(leaf, int(within[0]))
            check_group(read, int(self._shards[leaf].lengths_of(one)[0]), self._row(leaf))
        except FeedError:
            raise
        except Exception as error:
            self._check_unchanged(file)  # a change is not a bad row, and explains any other error
            raise RowError(
                f"rows that are stored together could not be read: {error}",
                stage="read",
                row=int(self._shards[leaf].firsts_of(one)[0]),
                file=str(self._paths[file]),
            ) from error
        self._check_unchanged(file)
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
            " fill nulls (pyarrow.compute.fill_null) and write the file again, leave the column out with "
            "columns=[...], or take another row in its place with feedline.Reading(bad_rows='substitute')",
            stage="read",
            row=int(rows[first]),
            file=str(self._paths[file]),
        )

    def _opened(self, file: int) -> GroupedFile:
        self._check_unchanged(file)
        held = self._open_file(Path(self._paths[file]), self._options)
        self._check_unchanged(file)
        return held

    def _check_unchanged(self, file: int) -> None:
        version = self._versions[file]
        if version is not None:
            version.check(self._paths[file])

    def __reduce__(self) -> Any:
        return type(self), (self._open_file, self._paths, self._options, self._versions)


def _version(path: str) -> FileVersion | None:
    """The version of a file. None for a directory, and where there is nothing: opening it says so."""
    return FileVersion.of(path) if Path(path).is_file() else None
