"""Splits a source into a training part and a test part, by a fixed rule and without a copy."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feedline._src.rows.row_source import RowSource

TEST_EVERY = 5


class Holdout:
    """A `RowSource` of one part of another source: rows r with r % 5 == 0 ("test"), or all other rows ("train").

    The row indices are computed, so the split needs no memory and no time at the start.

    Example:
      >>> from feedline._src.sources.open_source import as_source
      >>> rows = as_source({"x": np.arange(12)})
      >>> [Holdout(rows, part).rows_of(np.arange(len(Holdout(rows, part)))).tolist() for part in ("train", "test")]
      [[1, 2, 3, 4, 6, 7, 8, 9, 11], [0, 5, 10]]
    """

    def __init__(self, base: RowSource, part: Literal["train", "test"]) -> None:
        self.base = base
        self.part = part
        self.spec = base.spec

    @property
    def identity(self) -> dict[str, Any]:
        return {"holdout": self.part, "every": TEST_EVERY, "of": self.base.identity}

    def __len__(self) -> int:
        test_rows = -(-len(self.base) // TEST_EVERY)
        return test_rows if self.part == "test" else len(self.base) - test_rows

    def rows_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The row indices in the base source, of row indices in this part."""
        if self.part == "test":
            return rows * TEST_EVERY
        return rows + rows // (TEST_EVERY - 1) + 1

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        self.base.read(self.rows_of(rows), out)

    def close(self) -> None:
        self.base.close()
