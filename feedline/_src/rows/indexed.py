"""The base classes of feedline's sources: access to single rows, and a readable description."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex

import jax
import numpy as np

from feedline._src.rows.row_source import RowSource

_MOST_SHOWN = 8  # leaves of a row; a table may have thousands


class Indexed:
    """Supports `source[i]`, and has a readable `repr`.

    So it can be the source of a `grain.MapDataset`. To fill a batch, reading
    many rows at once is many times as fast.
    """

    format: str = "columns"
    """What a state says of how rows are read: "columns", "records" or "mixture"."""
    _paths: Sequence[str] = ()  # the paths of the files, as the user gave them

    def __len__(self) -> int:
        """The number of rows."""
        raise NotImplementedError

    @property
    def files(self) -> Iterable[str] | None:
        """Paths of the files and folders that the rows are made of; None: they are made of other things, too."""
        return self._paths or None

    def check_rows(self) -> None:
        """Refuse rows that are known to be bad although none was read, for a feed that raises bad rows.

        Raises:
          RowError: there are some.
        """

    def __getitem__(self, index: SupportsIndex) -> Any:
        """One row, in memory of its own.

        Raises:
          IndexError: there is no such row. A negative index counts from the end.
          TypeError: a slice, or anything else that is not an integer.
        """
        try:
            row = operator.index(index)
        except TypeError as error:
            raise TypeError(
                f"source[i] is one row, got {index!r} for i; grain.MapDataset.source(source)[start:stop:step] has "
                "several, read one by one, and a feed batches of them"
            ) from error
        count = len(self)
        if not -count <= row < count:
            raise IndexError(f"rows are 0 to {count - 1}, got {row}")
        return self._single(row % count)

    def _single(self, row: int) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(f'{name} {value}' for name, value in self._facts())}>"

    def _repr_html_(self) -> str:
        """The facts of `repr` as a table, for a notebook."""
        from feedline._src.notebook import table

        return table(type(self).__name__, self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        """The number of rows, the leaves of a row, and the files."""
        leaves = self._described()
        facts = [("rows", f"{len(self):,}"), *leaves[:_MOST_SHOWN]]
        if len(leaves) > _MOST_SHOWN:
            facts.append(("…", f"{len(leaves) - _MOST_SHOWN} more leaves"))
        if self._paths:
            more = f" … {self._paths[-1]}, {len(self._paths)} files" if len(self._paths) > 1 else ""
            facts.append(("from", f"{self._paths[0]}{more}"))
        return facts

    def _described(self) -> list[tuple[str, str]]:
        """Name and type of each leaf of a row."""
        raise NotImplementedError


OwnOrder = Literal["", "mixture", "endless mixture", "repeated"]
"""The order that a source brings along: that of a mixture, or of a Grain dataset after `repeat()`, which is one
endless epoch. "": it takes any."""


class IndexedSource(Indexed, RowSource):
    """A `RowSource` with single rows, which are trees of NumPy arrays and scalars."""

    @property
    def own_order(self) -> OwnOrder:
        """The order that it brings along."""
        return ""

    @property
    def epoch_rows(self) -> int:
        """Positions of an epoch."""
        return len(self)

    def _single(self, row: int) -> Any:
        out = jax.tree.map(lambda leaf: np.empty((1, *leaf.shape), leaf.dtype), self.spec)
        self.read(np.array([row], np.int64), out)
        return jax.tree.map(lambda array: array[0], out)

    def _described(self) -> list[tuple[str, str]]:
        return [
            (jax.tree_util.keystr(path, simple=True, separator=".") or "row", f"{leaf.dtype}{list(leaf.shape)}")
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.spec)
        ]


def own_order_of(source: RowSource) -> OwnOrder:
    """The order that any source brings along."""
    return source.own_order if isinstance(source, IndexedSource) else ""


def format_of(source: RowSource) -> str:
    """What a state says of how the rows of any source are read."""
    return source.format if isinstance(source, IndexedSource) else Indexed.format
