"""The source of files whose rows are used where they lie in memory, in one or several pieces a file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from feedline._src.files.version import FileVersion
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.versioned_files import VersionedFiles, Versions
from feedline._src.rows.shards import Shards
from feedline._src.sources.arrays import ArraySource


class MappedSource(ArraySource):
    """An `ArraySource` over files of a format that names its arrays itself.

    Objects in a store are fetched whole into the cache, and mapped there.

    Args:
      open_file: (path, options) → trees of arrays, whose rows follow each other.
      paths: of the files, in the order of their rows.
      options: columns.
      versions: the expected versions of the files; by default, the present ones. Or the files themselves, open.

    Raises:
      ValueError: no rows, or files that do not fit together.
      FeedError: a file does not have the expected version.
    """

    def __init__(
        self,
        open_file: Callable[[Path, OpenOptions], list[Any]],
        paths: Sequence[str],
        options: OpenOptions,
        versions: Versions | VersionedFiles | None = None,
    ) -> None:
        self._open_file, self._open_options = open_file, options
        self._versioned = VersionedFiles.of(paths, options.store, versions)
        local = [self._versioned[number] for number in range(len(paths))]
        before = {os.path.abspath(path): FileVersion.of(path) for path in local if path.is_file()}
        trees = [self._versioned.opened(number, open_file, options) for number in range(len(paths))]
        names = [path for path, pieces in zip(paths, trees, strict=True) for _ in pieces]
        super().__init__([piece for pieces in trees for piece in pieces], names=names)
        self._paths = list(paths)
        self._opened.versions.update(before)
        self._files_to_check = itertools.cycle(before.items())
        self._rows_of_files = Shards([sum(len(jax.tree.leaves(piece)[0]) for piece in pieces) for pieces in trees])

    @property
    def picklable(self) -> bool:
        """True: another process opens the files again."""
        return True

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._rows_of_files.of(np.array([row]))[0])]

    def __reduce__(self) -> Any:
        return MappedSource, (self._open_file, self._paths, self._open_options, self._versioned.versions)
